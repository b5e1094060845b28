"""The built-in tokenizer, nothing to download: UTF-8 bytes are ids 0 to 255.

`byte_tokenizer_files` says the same as a `tokenizer.json`, for exports: transformers and our
`FileTokenizer` then make the same ids. There every byte is a letter of GPT-2's byte alphabet,
which is what the `ByteLevel` steps of the tokenizers library write and read: a printable Latin-1
character stands for its own byte, the others are U+0100 and on. Without merges, ids are bytes.

Source   the tokenizers library's description of ByteLevel and BPE. Written from it.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.files import json_bytes

Ids = NDArray[np.int32]


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; <|endoftext|> 256, <|im_start|> 257, <|im_end|> 258."""

    name = "bytes"
    special_ids = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    vocab_size = 256 + len(special_ids)
    eos_id = 256
    bos_id: int | None = None
    chat_template: str | None = None
    sha256 = hashlib.sha256(b"bytes 0-255, " + " ".join(special_ids).encode()).hexdigest()

    def encode(self, text: str) -> Ids:
        """int32 [bytes of the text in UTF-8]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def encode_offsets(self, text: str, *, special: bool) -> tuple[Ids, NDArray[np.int64]]:
        """See Tokenizer."""
        ids: list[Ids] = [np.empty(0, np.int32)]
        starts: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        begin = 0
        # re.split with a group keeps the separators: every second part is a special token.
        for i, part in enumerate(re.split(_NAMES, text) if special else [text]):
            if i % 2:
                ids.append(np.array([self.special_ids[part]], np.int32))
                starts.append(np.array([begin]))
            else:
                ids.append(self.encode(part))
                points = np.frombuffer(part.encode("utf-32-le"), np.uint32)
                # A character takes one byte, and one more from each of these code points on.
                size = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
                starts.append(np.repeat(np.arange(begin, begin + len(part)), size))
            begin += len(part)
        return np.concatenate(ids), np.concatenate(starts)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text; special ids are left out, bytes that are not UTF-8 become U+FFFD."""
        values = np.asarray(ids, np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


_NAMES = "(" + "|".join(map(re.escape, ByteTokenizer.special_ids)) + ")"


def byte_tokenizer_files() -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json of `ByteTokenizer`, by name.

    transformers 5 takes its own Qwen2 class for every `qwen2` model, whatever the file says: that
    one normalises text to NFC before it encodes. All other families are exact for any text.
    """
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": name, **_AS_IT_STANDS}
            for name, i in ByteTokenizer.special_ids.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {**step, "use_regex": False},
        "post_processor": None,
        "decoder": {**step, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_alphabet())},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the file as it is
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(i): {"content": name, **_AS_IT_STANDS}
            for name, i in ByteTokenizer.special_ids.items()
        },
    }
    return {"tokenizer.json": json_bytes(definition), "tokenizer_config.json": json_bytes(config)}


_AS_IT_STANDS: dict[str, Any] = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
"""How a special token is found in text: where it stands, spaces beside it untouched."""


def _alphabet() -> list[str]:
    """The letter of each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
