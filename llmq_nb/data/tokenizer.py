"""Tokenizers: bytes (built in, nothing to download) and any `tokenizer.json`.

Text never becomes a special token: `<|endoftext|>` in a document is encoded as plain characters.
Special ids come in only through `eos_id`, `bos_id` and the chat template, where the program itself
puts them.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer

from llmq_nb.core.errors import UserError
from llmq_nb.data.byte_tokenizer import ByteTokenizer, byte_tokenizer_files
from llmq_nb.data.store import TokenizerInfo

Ids = NDArray[np.int32]


class Tokenizer(Protocol):
    """Text to ids (int32 [n], no special ids) and back."""

    name: str
    sha256: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    special_ids: dict[str, int]
    chat_template: str | None
    """Jinja source as Hugging Face writes it."""

    def encode(self, text: str) -> Ids: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
    def encode_offsets(self, text: str, *, special: bool) -> tuple[Ids, NDArray[np.int64]]:
        """Ids and the index of the character that each begins with, both [n].

        special: names of special tokens in the text become their ids (for chat templates alone).
        """
        ...

    def decode(self, ids: Sequence[int] | Ids) -> str: ...


def tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    """The record of a tokenizer that a store keeps."""
    return TokenizerInfo(
        name=tokenizer.name,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        special_ids=dict(tokenizer.special_ids),
    )


def load_tokenizer(name: str | Path) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json or of a folder that holds one.

    The file that an export of ours has for `bytes` is `bytes` again: one name and one hash, so
    stores and models made with either go together. Raises UserError as `FileTokenizer` does.
    """
    if str(name) == "bytes":
        return ByteTokenizer()
    tokenizer = FileTokenizer(name)
    written = hashlib.sha256(byte_tokenizer_files()["tokenizer.json"]).hexdigest()
    return ByteTokenizer() if tokenizer.sha256 == written else tokenizer


def export_source(name: str) -> str | dict[str, bytes]:
    """What `io.export.export_model` takes for the tokenizer `name`: its path, or files by name."""
    return byte_tokenizer_files() if name == "bytes" else name


class FileTokenizer:
    """A tokenizer.json, with eos, bos and chat template from the tokenizer_config.json beside it.

    Raises UserError if a file is missing or malformed, or no end-of-document token is named.
    """

    def __init__(self, path: str | Path) -> None:
        given = Path(path).expanduser()
        self.path = given / "tokenizer.json" if given.is_dir() else given
        if not self.path.is_file():
            mend = "give a tokenizer.json or its folder; 'bytes' needs no file"
            raise UserError("no such tokenizer", where=str(self.path), mend=mend)
        data = self.path.read_bytes()
        try:
            self._rust = RustTokenizer.from_buffer(data)
        except Exception as error:  # the Rust side raises bare Exception
            raise UserError(f"not a tokenizer.json ({error})", where=str(self.path)) from error
        self._rust.no_padding()
        self._rust.no_truncation()
        self.name = (given if given.is_dir() else given.parent).resolve().name
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.special_ids = {
            token.content: i
            for i, token in self._rust.get_added_tokens_decoder().items()
            if token.special
        }
        # Ids may have holes: the vocabulary ends after the highest one.
        self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values()) + 1
        eos = self._named_id("eos_token")
        self.eos_id = self._fallback_eos() if eos is None else eos
        self.bos_id = self._named_id("bos_token")
        self.chat_template = self._chat_template()
        # From here on names of special tokens are plain text; `encode_offsets` has another one.
        self._rust.encode_special_tokens = True
        self._definition = data

    @cached_property
    def _rust_special(self) -> RustTokenizer:
        rust = RustTokenizer.from_buffer(self._definition)
        rust.no_padding()
        rust.no_truncation()
        return rust

    @cached_property
    def config(self) -> dict[str, Any]:
        """tokenizer_config.json, {} if there is none."""
        file = self.path.with_name("tokenizer_config.json")
        if not file.is_file():
            return {}
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"malformed JSON ({error})", where=str(file)) from error
        if not isinstance(config, dict):
            raise UserError("not a JSON object", where=str(file))
        return config

    def _named_id(self, key: str) -> int | None:
        """Id of the token the config names under `key`: a string, or an object with `content`."""
        token = self.config.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            return None
        number = self._rust.token_to_id(content)
        if number is None:
            where = str(self.path.with_name("tokenizer_config.json"))
            raise UserError(f"{key} {content!r} is not in the vocabulary", where=where)
        return number

    def _fallback_eos(self) -> int:
        """Without a config: the special token that ends a text in the families we train."""
        for content in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"):
            if content in self.special_ids:
                return self.special_ids[content]
        raise UserError(
            "no end-of-document token",
            where=str(self.path),
            mend='name it as "eos_token" in tokenizer_config.json beside it',
        )

    def _chat_template(self) -> str | None:
        """chat_template.jinja, else the config's: a string, or the default of a named list."""
        file = self.path.with_name("chat_template.jinja")
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        return template

    def encode(self, text: str) -> Ids:
        """int32 ids of the text alone: nothing is put before or after it."""
        return np.array(self._rust.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text, on all cores."""
        encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_offsets(self, text: str, *, special: bool) -> tuple[Ids, NDArray[np.int64]]:
        """See Tokenizer."""
        rust = self._rust_special if special else self._rust
        encoding = rust.encode(text, add_special_tokens=False)
        starts = np.array([begin for begin, _ in encoding.offsets], np.int64)
        return np.array(encoding.ids, np.int32), starts

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text, special ids left out."""
        return self._rust.decode([int(i) for i in ids], skip_special_tokens=True)
