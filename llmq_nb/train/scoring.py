"""How good a model is: its loss by position, and tasks with right answers.

    choices    log p(choice | prompt), summed over the choice's tokens; and that sum over the
               choice's bytes in UTF-8, which makes long choices and other tokenizers comparable
    answers    what greedy generation says after the prompt

Products of tasks run in the weights' own format: FP8 would scale questions by their common absmax.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from llmq_nb.core.errors import UserError
from llmq_nb.data.loader import EvalBatch
from llmq_nb.data.packing import IGNORE
from llmq_nb.data.prompts import PromptCoder
from llmq_nb.data.tasks import ExactMatch, MultipleChoice, Question
from llmq_nb.data.tokenizer import Ids
from llmq_nb.train.eager import Kind
from llmq_nb.train.generation import Generator, Sampling
from llmq_nb.train.inference import Inference, Opened

WINDOW = 512
"""Tokens of a window that choices are packed into, unless one is longer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Targets that see `first` to `last` tokens of their document. loss: mean, NaN of none."""

    first: int
    last: int
    tokens: int
    loss: float


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """log_probabilities of the choices, summed and by byte, and which is the largest of each."""

    sums: tuple[float, ...]
    by_byte: tuple[float, ...]

    @property
    def chosen(self) -> int:
        return int(np.argmax(self.sums))

    @property
    def chosen_by_byte(self) -> int:
        return int(np.argmax(self.by_byte))


class Evaluator:
    """One model's weights, shared by what runs on them one after the other. A context manager."""

    def __init__(self, opened: Opened, kind: Kind) -> None:
        self.opened, self.model = opened, opened.model
        self.kind: Kind = kind
        self._owner = Inference(
            opened.model,
            micro_batch=1,
            seq_len=1,
            base=opened.precision,
            arrays=opened.arrays,
            kind=kind,
        )
        self.weights = {
            name.removeprefix("weights/"): tensor
            for name, tensor in self._owner.eager.tensors.items()
            if name.startswith("weights/")
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.eager.close()

    def inference(self, micro_batch: int, seq_len: int, *, exact: bool = False) -> Inference:
        """exact: products in the weights' own format, whatever the run's."""
        base = self.opened.precision
        if exact:
            precision = dataclasses.replace(base.precision, matmul=None, bf16_layers=())
            base = dataclasses.replace(base, precision=precision)
        return Inference(
            self.model,
            micro_batch=micro_batch,
            seq_len=seq_len,
            base=base,
            weights=_plain(self.weights) if exact else self.weights,
            kind=self.kind,
        )

    def generator(self, rows: int, length: int, prompt: int) -> Generator:
        return Generator(
            self.model,
            rows=rows,
            length=length,
            prompt=prompt,
            base=self.opened.precision,
            weights=self.weights,
            kind=self.kind,
        )


def _plain(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: dataclasses.replace(tensor, fp8=None) for name, tensor in weights.items()}


def loss_by_position(
    inference: Inference, batches: Iterator[EvalBatch]
) -> tuple[float, int, list[Bucket]]:
    """(mean loss, supervised tokens, buckets whose ends are powers of two)."""
    size = inference.config.batch.seq_len.bit_length()
    sums, counts = np.zeros(size), np.zeros(size, np.int64)
    for batch, losses in inference.losses(batches):
        counted = batch.targets != IGNORE
        seen = np.arange(batch.targets.shape[1]) - batch.segment_start + 1
        bucket = np.frexp(seen[counted].astype(np.float64))[1] - 1  # floor(log2)
        sums += np.bincount(bucket, losses[counted].astype(np.float64), size)
        counts += np.bincount(bucket, minlength=size)
    tokens = int(counts.sum())
    loss = math.fsum(sums) / tokens if tokens else math.nan
    buckets = [
        Bucket(1 << i, min((2 << i) - 1, inference.config.batch.seq_len), int(n), float(s / n))
        for i, (s, n) in enumerate(zip(sums, counts, strict=True))
        if n
    ]
    return loss, tokens, buckets


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A question in ids: the prompt's, and each choice's (none for exact match)."""

    question: Question
    prompt: Ids
    choices: tuple[Ids, ...] = ()


def encode_questions(
    questions: Sequence[Question], coder: PromptCoder, *, positions: int, answer_tokens: int
) -> list[Encoded]:
    """Every question in ids. UserError names the line of one that is too long for the model."""
    out = []
    for question in questions:
        where, prompt = question.prompt.where, coder.encode(question.prompt)
        choices: tuple[Ids, ...] = ()
        if isinstance(question, MultipleChoice):
            ids = (coder.tokenizer.encode(choice) for choice in question.choices)
            choices = tuple(coder.checked(i, where) for i in ids)
            needed = len(prompt) + max(map(len, choices)) - 1
        else:
            needed = len(prompt) + answer_tokens
        if needed > positions:
            mend = f"the model has {positions} positions"
            raise UserError(f"a question of {needed} tokens", where=where, mend=mend)
        out.append(Encoded(question, prompt, choices))
    return out


def score_choices(
    evaluator: Evaluator, encoded: Sequence[Encoded], micro_batch: int
) -> list[Choices]:
    """Of multiple-choice questions, in their order."""
    pairs = [(e.prompt, choice) for e in encoded for choice in e.choices]
    if not pairs:
        return []
    longest = max(len(p) + len(c) - 1 for p, c in pairs)
    seq_len = max(longest, min(WINDOW, evaluator.model.max_position))
    inference = evaluator.inference(micro_batch, seq_len, exact=True)
    sums = iter(log_probabilities(inference, pairs))
    inference.eager.close()
    out = []
    for e in encoded:
        assert isinstance(e.question, MultipleChoice)
        own = tuple(next(sums) for _ in e.choices)
        sizes = [len(choice.encode("utf-8")) for choice in e.question.choices]
        out.append(Choices(own, tuple(s / n for s, n in zip(own, sizes, strict=True))))
    return out


def log_probabilities(inference: Inference, pairs: Sequence[tuple[Ids, Ids]]) -> list[float]:
    """log p(second | first) in nats, of each pair of non-empty ids. Several share a window."""
    B, T = inference.config.batch.micro_batch, inference.config.batch.seq_len
    places: list[list[tuple[int, int, int, int]]] = [[]]  # of a window: pair, start, first, end
    used = 0
    for number, (before, after) in enumerate(pairs):
        length = len(before) + len(after) - 1
        if used + length > T:
            places.append([])
            used = 0
        places[-1].append((number, used, used + len(before) - 1, used + length))
        used += length
    out = [0.0] * len(pairs)

    def batches() -> Iterator[EvalBatch]:
        for begin in range(0, len(places), B):
            tokens, segment_start = np.zeros((2, B, T), np.int32)
            targets = np.full((B, T), IGNORE, np.int32)
            for row, window in enumerate(places[begin : begin + B]):
                for number, start, first, end in window:
                    text = np.concatenate(pairs[number])
                    tokens[row, start:end], segment_start[row, start:] = text[:-1], start
                    targets[row, first:end] = text[len(pairs[number][0]) :]
            yield EvalBatch(tokens, targets, segment_start, int((targets != IGNORE).sum()))

    for index, (_, losses) in enumerate(inference.losses(batches())):
        for row, window in enumerate(places[index * B : (index + 1) * B]):
            for number, _, first, end in window:
                out[number] = -float(losses[row, first:end].sum(dtype=np.float64))
    return out


def answer_questions(
    evaluator: Evaluator,
    encoded: Sequence[Encoded],
    coder: PromptCoder,
    *,
    rows: int,
    answer_tokens: int,
) -> list[str]:
    """The model's greedy texts after the prompts of exact-match questions, in their order."""
    if not encoded:
        return []
    longest = max(len(e.prompt) for e in encoded)
    texts: list[str] = []
    rows = min(rows, len(encoded))
    with evaluator.generator(rows, longest + answer_tokens, longest) as generator:
        for begin in range(0, len(encoded), rows):
            texts += _answers(generator, encoded[begin : begin + rows], coder, answer_tokens)
    return texts


def _answers(
    generator: Generator, part: Sequence[Encoded], coder: PromptCoder, answer_tokens: int
) -> list[str]:
    decode = coder.tokenizer.decode
    ends = [e.question.stop if isinstance(e.question, ExactMatch) else () for e in part]
    talks = coder.chat or any(e.question.prompt.messages is not None for e in part)

    def stops(row: int, new: list[int]) -> bool:
        return bool(ends[row]) and any(end in decode(new) for end in ends[row])

    new: list[list[int]] = [[] for _ in part]
    made = generator.generate(
        [e.prompt for e in part],
        answer_tokens,
        Sampling(temperature=0.0),
        stop_ids=coder.end_ids(generator.model.eos_ids, chat=talks),
        stops=stops,
    )
    for row, token in made:
        new[row].append(token)
    return [decode(ids) for ids in new]


def accuracy(right: Sequence[bool]) -> tuple[float, float]:
    """(share, its standard error) of right answers; NaN of none.

    The error is that of one more right and one more wrong answer: two right ones say little.
    """
    if not right:
        return math.nan, math.nan
    smooth = (sum(right) + 1) / (len(right) + 2)
    return sum(right) / len(right), math.sqrt(smooth * (1 - smooth) / len(right))
