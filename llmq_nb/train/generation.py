"""Text from prompts, a batch at a time, with cached keys and values.

Two ranks share weights and cache: one takes prompts in pieces of `piece` tokens a row, the other
one new token a row. A row's tokens have its own positions, so rows of any lengths go together, and
what a short row has beyond its end lies where nothing reads it before it is written again.

A row gives the tokens that it would give alone but for the rounding of products whose sums a
library orders by the number of rows. Products run in the weights' own format: FP8 would scale all
rows by their common absmax.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import BatchConfig, Config, MemoryConfig
from llmq_nb.core.device import DeviceError
from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.core.rng import Purpose, philox
from llmq_nb.core.rounding import to_float32
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.config import ALIGNMENT, ModelConfig
from llmq_nb.plan.buffers import INFERENCE, Buffer
from llmq_nb.train.eager import Eager, Kind, make_eager
from llmq_nb.train.engine import load
from llmq_nb.train.inference import Arrays
from llmq_nb.train.rank import cache_name

PIECE = 256
"""Most tokens of each prompt that are taken at once."""
HEAD = 1024
"""Likeliest tokens that are looked at before all of a vocabulary is sorted."""
Ids = Sequence[int] | NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 takes the likeliest token; top_p: of the likeliest that hold it together."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


class Generator:
    """Rows of at most `length` tokens with fixed buffers; a context manager."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        rows: int,
        length: int,
        base: Config,
        prompt: int = PIECE,
        weights: Mapping[str, Tensor] | None = None,
        arrays: Arrays | None = None,
        kind: Kind = "cpu",
    ) -> None:
        """prompt: tokens of the longest prompt. base: the config whose storage format is used.

        weights: tensors to share by name, or arrays: to copy. kind: the device, that of shared
        weights.
        """
        self.model, self.rows, self.length = model, rows, length
        self.piece = max(1, min(PIECE, prompt - 1, length))
        precision = dataclasses.replace(base.precision, matmul=None, bf16_layers=())
        base = dataclasses.replace(base, precision=precision)
        positions = length + self.piece  # those of a last piece's padding too
        layout = (rows, length, 2 * model.G * model.D)
        storage = DType(precision.dtype)
        caches = [Buffer(cache_name(i), layout, storage, "activations") for i in range(model.L)]
        groups = INFERENCE if weights is None else INFERENCE - {"weights"}
        shared = {
            f"weights/{name}": dataclasses.replace(tensor, fp8=None)
            for name, tensor in (weights or {}).items()
        }
        config = _config(base, rows, self.piece)
        self._first = make_eager(
            kind, config, model, groups, shared, extra=caches, positions=positions
        )
        for parameter, array in arrays or ():
            ops = self._first.rank.ops
            ops.write(self._first.tensors[f"weights/{parameter.name}"], array)
        shared |= {
            name: tensor
            for name, tensor in self._first.tensors.items()
            if name.startswith(("weights/", "cache/"))
        }
        config = _config(base, rows, 1)
        groups = INFERENCE - {"weights"}
        self._next = make_eager(kind, config, model, groups, shared, positions=positions)
        self._replay: Callable[[], None] | None = None
        self._warm = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; shared weights stay."""
        self._next.close()
        self._first.close()

    def generate(
        self,
        prompts: Sequence[Ids],
        count: int,
        sampling: Sampling = Sampling(),
        *,
        stop_ids: Collection[int] | None = None,
        stops: Callable[[int, list[int]], bool] = lambda row, new: False,
    ) -> Iterator[tuple[int, int]]:
        """(row, token) of up to `count` tokens after each of at most `rows` prompts, by turns.

        A row ends before a token of stop_ids (None: the model's ends of text), or where
        stops(row, its new tokens) becomes true. A row that is full goes on from its last half.
        Equal prompts go different ways: the n-th of them has its own random numbers.
        """
        if not 0 < len(prompts) <= self.rows:
            raise ValueError(f"{len(prompts)} prompts for {self.rows} rows")
        texts = [list(map(int, prompt)) for prompt in prompts]
        if not all(texts):
            raise UserError("empty prompt", where="--prompt", mend="give at least one token")
        ends = frozenset(self.model.eos_ids if stop_ids is None else stop_ids)
        copies = [texts[:row].count(text) for row, text in enumerate(texts)]
        lengths = [len(text) for text in texts]
        texts += [[0]] * (self.rows - len(texts))
        # of each row: tokens that are out of sight
        hidden = [max(0, len(text) - self.length) for text in texts]
        self._take([text[skip:-1] for text, skip in zip(texts, hidden, strict=True)], texts, hidden)
        alive = list(range(len(prompts)))
        for index in range(count):
            full = [row for row in alive if len(texts[row]) - hidden[row] > self.length]
            for row in full:
                hidden[row] = len(texts[row]) - max(1, self.length // 2)
            if full:
                again = [text[hidden[i] : -1] if i in full else [] for i, text in enumerate(texts)]
                self._take(again, texts, hidden)
            logits = self._logits(texts, hidden)
            for row in list(alive):
                token = sample(logits[row], sampling, index, copies[row])
                if token in ends:
                    alive.remove(row)
                    continue
                texts[row].append(token)
                yield row, token
                if stops(row, texts[row][lengths[row] :]):
                    alive.remove(row)
            if not alive:
                return

    def _take(self, new: list[list[int]], texts: list[list[int]], hidden: list[int]) -> None:
        """Bring the first tokens of rows into the cache; rows with nothing new stay as they are."""
        rank = self._first.rank
        for begin in range(0, max(map(len, new)), self.piece):
            tokens = np.zeros((self.rows, self.piece), np.int32)
            first = np.zeros((self.rows, 1), np.int32)
            for row, text in enumerate(new):
                part = text[begin : begin + self.piece]
                tokens[row, : len(part)] = part
                at_end = len(texts[row]) - hidden[row] - 1
                first[row] = begin if part else at_end
            load(rank, tokens, tokens, np.broadcast_to(-first, tokens.shape), None)
            _forward(self._first)

    def _logits(self, texts: list[list[int]], hidden: list[int]) -> NDArray[np.float32]:
        """Logits (rows, V) of what follows each text, whose last token is not cached yet."""
        tokens = np.array([[text[-1]] for text in texts], np.int32)
        last = [min(len(t) - h, self.length) - 1 for t, h in zip(texts, hidden, strict=True)]
        rank = self._next.rank
        load(rank, tokens, tokens, -np.array(last, np.int32)[:, None], None)
        self._run()
        logits = rank.ops.read(rank.model.head.logits.rows(0, self.rows))
        return to_float32(logits)[:, : self.model.V]

    def _run(self) -> None:
        """One token a row. On a GPU the second run is recorded, later ones are replays."""
        rank = self._next.rank

        def work() -> None:
            _forward(self._next)
            rank.model.logits_of(0, self.rows)

        if self._replay is None and self._warm and not rank.host_stores:
            self._replay = _recorded(self._next, work)
        (self._replay or work)()
        self._warm = True


def _config(base: Config, rows: int, seq_len: int) -> Config:
    """Nothing is kept for a backward; the logits buffer has one row for each row of the batch."""
    chunks = max(1, rows * seq_len // max(rows, ALIGNMENT))
    return dataclasses.replace(
        base,
        batch=BatchConfig(micro_batch=rows, seq_len=seq_len),
        memory=MemoryConfig(recompute=("block",), head_chunks=chunks),
    )


def _forward(eager: Eager) -> None:
    model = eager.rank.model
    eager.rank.begin()
    model.embed()
    for layer in range(model.config.L):
        model.forward(layer)
    eager.rank.finish()


def _recorded(eager: Eager, work: Callable[[], None]) -> Callable[[], None]:
    """`work` as a CUDA graph; itself where there is no stream, or no graph can be had."""
    stream = getattr(eager.rank.ops, "stream", None)
    if stream is None:
        return work
    from llmq_nb.core.graph import capture

    try:
        graph = capture(stream, work, name="one token")
    except DeviceError:
        return work
    return lambda: graph.launch(stream)


def sample(logits: NDArray[np.float32], sampling: Sampling, index: int, copy: int = 0) -> int:
    """A token by its logits (V,). index of the new token and copy of the prompt choose the bits."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    x = logits.astype(np.float64) / sampling.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = _likeliest(p, sampling.top_p)
    total = np.cumsum(p[order])
    kept = int(np.searchsorted(total, sampling.top_p)) + 1  # the smallest set that holds top_p
    counter = (index, copy, 0, 0)
    word = int(philox(counter, (sampling.seed, int(Purpose.SAMPLE))).reshape(-1)[0])
    point = (word + 0.5) / 2.0**32 * total[min(kept, total.size) - 1]
    return int(order[min(int(np.searchsorted(total, point)), total.size - 1)])


def _likeliest(p: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Tokens by falling probability, equal ones by number: all, or enough that hold top_p."""
    if top_p < 1 and p.size > HEAD:
        some = np.sort(np.argpartition(-p, HEAD)[:HEAD])
        some = some[np.argsort(-p[some], kind="stable")]
        held = int(np.searchsorted(np.cumsum(p[some]), top_p))
        if held < HEAD and p[some[held]] > p[some[-1]]:  # no other is as likely as the last one
            return some
    return np.argsort(-p, kind="stable")
