"""Stores for the data tests: on disk with tiny shards, and in memory."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmq_nb.data.store import TokenizerInfo, TokenStore
from llmq_nb.data.store_writer import StoreWriter
from tests.e2e.conftest import cli

__all__ = ["cli"]


class MemoryStore:
    """A TokenSource over a list of documents (and masks), by nothing but NumPy slices."""

    name = "memory"

    def __init__(
        self,
        documents: Sequence[NDArray[Any]],
        masks: Sequence[NDArray[np.bool_]] | None = None,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        self.tokenizer = TokenizerInfo(name="t", sha256="0", vocab_size=vocab_size, eos_id=0)
        self.vocab_size = vocab_size
        self.tokens = np.concatenate(documents)
        self.mask = None if masks is None else np.concatenate(masks)
        lengths = [len(document) for document in documents]
        self.document_starts = np.cumsum([0, *lengths[:-1]])
        self.has_mask = masks is not None
        counted = np.ones(len(self.tokens), bool) if self.mask is None else self.mask.copy()
        counted[self.document_starts] = False
        self.supervised = int(counted.sum())

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        return self.tokens[start:stop].copy()

    def read_mask(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        return None if self.mask is None else self.mask[start:stop].copy()


@pytest.fixture(scope="session")
def memory_store() -> type[MemoryStore]:
    return MemoryStore


@pytest.fixture(scope="session")
def tokenizer_record() -> Callable[..., TokenizerInfo]:
    def make(vocab_size: int = 259, sha256: str = "ab" * 32) -> TokenizerInfo:
        return TokenizerInfo(
            name="test", sha256=sha256, vocab_size=vocab_size, eos_id=1, special_ids={"<e>": 1}
        )

    return make


@pytest.fixture(scope="session")
def write_store(tokenizer_record: Callable[..., TokenizerInfo]) -> Callable[..., TokenStore]:
    """Write documents into a store with shards of 256 tokens and open it."""

    def make(
        path: Path,
        documents: Sequence[NDArray[Any]],
        masks: Sequence[NDArray[np.bool_]] | None = None,
        *,
        vocab_size: int = 259,
        sha256: str = "ab" * 32,
    ) -> TokenStore:
        record = tokenizer_record(vocab_size, sha256)
        with StoreWriter(path, record, masks is not None, chunk=64, shard=256) as writer:
            for i, document in enumerate(documents):
                writer.append(document, None if masks is None else masks[i])
        return TokenStore(path)

    return make


@pytest.fixture(scope="session")
def random_documents() -> Callable[..., list[NDArray[np.int64]]]:
    def make(
        seed: int, count: int = 40, longest: int = 300, vocab_size: int = 259
    ) -> list[NDArray[np.int64]]:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, vocab_size, n) for n in rng.integers(1, longest, count)]

    return make


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE of 400 ids, trained here, as Hugging Face lays it out."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"],
    )
    words = "the quick brown fox jumps over a lazy dog and says assistant user hello\n" * 20
    rust.train_from_iterator([words], trainer)
    folder = tmp_path_factory.mktemp("bpe")
    rust.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
