"""`llmq-nb eval`: the loss of a model on a token store, and tasks with right answers."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmq_nb.data.prompts import PromptCoder
    from llmq_nb.train.inference import Opened
    from llmq_nb.train.scoring import Encoded, Evaluator


@click.command("eval")
@click.argument("model", type=click.Path())
@click.option("--data", default=None, type=click.Path(), help="A token store (.zarr): the loss.")
@click.option(
    "--task",
    "tasks",
    multiple=True,
    type=click.Path(),
    help="Questions with answers (.jsonl): how many are right; may be given again.",
)
@click.option(
    "--seq-len",
    default=None,
    type=click.IntRange(1),
    help="Tokens in a window of --data; default: the run's batch.seq_len; 1024 for a folder.",
)
@click.option("--micro-batch", default=4, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=None, type=click.IntRange(1), help="Micro-batches; default: all.")
@click.option("--chat", is_flag=True, help="A task's prompt is what a user says.")
@click.option("--answer-tokens", default=256, show_default=True, type=click.IntRange(1))
@click.option("--regex", default=None, help="What an answer is, for tasks that do not say it.")
@click.option("--tokenizer", default=None, help="`bytes`, a tokenizer.json or its folder.")
@click.option("--details", default=None, type=click.Path(), help="Write each answer (.jsonl).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    data: str | None,
    tasks: tuple[str, ...],
    seq_len: int | None,
    micro_batch: int,
    steps: int | None,
    chat: bool,
    answer_tokens: int,
    regex: str | None,
    tokenizer: str | None,
    details: str | None,
    as_json: bool,
) -> None:
    """The loss of MODEL (Hugging Face folder, checkpoint or run's folder), or its answers.

    A line of a task is {"prompt": ..., "choices": [...], "answer": 0}, which is right if the choice
    with that index is the likeliest, or {"prompt": ..., "answer": ...}, which is right if greedy
    generation says it; llmq_nb/data/tasks.py has all keys.
    """
    from llmq_nb.core.errors import UserError
    from llmq_nb.train.inference import open_model
    from llmq_nb.train.scoring import Evaluator
    from llmq_nb.train.setup import inference_kind

    if data is None and not tasks:
        raise UserError("neither --data nor --task", mend="give a token store, or questions")
    if details is not None and (not tasks or not Path(details).absolute().parent.is_dir()):
        what = "its folder does not exist" if tasks else "it needs --task"
        raise UserError(f"{details}: {what}", where="--details", mend="see --help")
    opened = open_model(model, seq_len=seq_len or 1)
    window = None if data is None else _window(opened, data, seq_len)
    coder, questions = None, []
    if tasks:
        coder = _coder(opened, model, tokenizer, chat)
        questions = [_questions(task, opened, coder, answer_tokens, regex) for task in tasks]
    result: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    with Evaluator(opened, inference_kind(opened.precision, opened.model)) as evaluator:
        if data is not None and window is not None:
            result |= _loss(evaluator, data, window, micro_batch, steps)
        for task, encoded in zip(tasks, questions, strict=True):
            assert coder is not None
            found, answers = _task(evaluator, encoded, coder, micro_batch, answer_tokens)
            result.setdefault("tasks", []).append({"task": task, **found})
            lines += [{"task": task, **answer} for answer in answers]
    if details is not None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        Path(details).write_text(text, encoding="utf-8")
    click.echo(json.dumps(result) if as_json else "\n".join(_shown(result)))


def _window(opened: "Opened", data: str, seq_len: int | None) -> int:
    """Tokens of a window. UserError: a store of another tokenizer, too long a window."""
    from llmq_nb.core.errors import UserError
    from llmq_nb.data.store import TokenStore, check_tokenizer, check_vocabulary
    from llmq_nb.data.tokenizer import load_tokenizer, tokenizer_info

    store = TokenStore(data)
    check_vocabulary(store, opened.model.V)
    if opened.tokenizer is not None:
        check_tokenizer(store, tokenizer_info(load_tokenizer(opened.tokenizer)))
    if seq_len is None:
        return min(opened.precision.batch.seq_len, opened.model.max_position)
    if seq_len > opened.model.max_position:
        mend = f"the model has {opened.model.max_position} positions"
        raise UserError(f"{seq_len}", where="--seq-len", mend=mend)
    return seq_len


def _coder(opened: "Opened", model: str, tokenizer: str | None, chat: bool) -> "PromptCoder":
    from llmq_nb.core.errors import UserError
    from llmq_nb.data.prompts import PromptCoder
    from llmq_nb.data.tokenizer import load_tokenizer

    name = tokenizer or opened.tokenizer
    if name is None:
        raise UserError(f"{model} has no tokenizer", mend="give one with --tokenizer")
    return PromptCoder(load_tokenizer(name), opened.model.V, chat=chat)


def _questions(
    task: str, opened: "Opened", coder: "PromptCoder", answer_tokens: int, regex: str | None
) -> "list[Encoded]":
    from llmq_nb.data.tasks import read_task
    from llmq_nb.train.scoring import encode_questions

    positions = opened.model.max_position
    return encode_questions(
        read_task(task, regex), coder, positions=positions, answer_tokens=answer_tokens
    )


def _loss(
    evaluator: "Evaluator", data: str, seq_len: int, micro_batch: int, steps: int | None
) -> dict[str, Any]:
    from llmq_nb.data.loader import eval_batches
    from llmq_nb.data.store import TokenStore
    from llmq_nb.train.scoring import loss_by_position

    inference = evaluator.inference(micro_batch, seq_len)
    packing = evaluator.opened.precision.data.packing
    batches = eval_batches(TokenStore(data), micro_batch, seq_len, steps, packing=packing)
    loss, tokens, buckets = loss_by_position(inference, batches)
    inference.eager.close()
    positions = [
        {"from": b.first, "to": b.last, "tokens": b.tokens, "loss": b.loss} for b in buckets
    ]
    return {"loss": loss, "perplexity": math.exp(loss), "tokens": tokens, "positions": positions}


def _task(
    evaluator: "Evaluator",
    encoded: "list[Encoded]",
    coder: "PromptCoder",
    micro_batch: int,
    answer_tokens: int,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Shares of right answers, and every answer."""
    from llmq_nb.data.tasks import ExactMatch, MultipleChoice
    from llmq_nb.train.scoring import accuracy, answer_questions, score_choices

    choosing = [e for e in encoded if isinstance(e.question, MultipleChoice)]
    asking = [e for e in encoded if isinstance(e.question, ExactMatch)]
    scores = score_choices(evaluator, choosing, micro_batch)
    texts = answer_questions(
        evaluator, asking, coder, rows=micro_batch, answer_tokens=answer_tokens
    )
    answers: list[dict[str, Any]] = []
    for e, score in zip(choosing, scores, strict=True):
        right = {"right": score.chosen == e.question.answer}  # type: ignore[union-attr]
        by_byte = {"right_by_byte": score.chosen_by_byte == e.question.answer}  # type: ignore[union-attr]
        facts = {"log_probabilities": score.sums, "by_byte": score.by_byte}
        answers.append({**_named(e), **right, **by_byte, **facts})
    for e, text in zip(asking, texts, strict=True):
        assert isinstance(e.question, ExactMatch)
        answer = e.question.answer_in(text)
        right = {"right": e.question.right(answer)}
        answers.append({**_named(e), **right, "answer": answer, "text": text})
    result: dict[str, Any] = {}
    if choosing:
        part = answers[: len(choosing)]
        share, error = accuracy([a["right"] for a in part])
        by_byte, by_byte_error = accuracy([a["right_by_byte"] for a in part])
        result["multiple_choice"] = {
            "questions": len(part), "accuracy": share, "error": error,
            "accuracy_by_byte": by_byte, "error_by_byte": by_byte_error,
        }  # fmt: skip
    if asking:
        part = answers[len(choosing) :]
        share, error = accuracy([a["right"] for a in part])
        result["exact_match"] = {"questions": len(part), "accuracy": share, "error": error}
    return result, answers


def _named(e: "Encoded") -> dict[str, Any]:
    return {"where": e.question.prompt.where, **({"id": e.question.id} if e.question.id else {})}


def _shown(result: dict[str, Any]) -> list[str]:
    """The result as lines."""
    out = []
    if "loss" in result:
        out.append(
            f"loss {result['loss']:.6f}, perplexity {result['perplexity']:.4f}, on"
            f" {result['tokens']:,} tokens"
        )
        out.append("by tokens in sight:")
        for b in result["positions"]:
            place = f"{b['from']:,}" if b["from"] == b["to"] else f"{b['from']:,} to {b['to']:,}"
            out.append(f"  {place:>16}  {b['loss']:8.4f}  {b['tokens']:>12,} tokens")
    for task in result.get("tasks", []):
        out.append(f"{task['task']}:")
        if "multiple_choice" in task:
            m = task["multiple_choice"]
            out.append(
                f"  multiple choice, {m['questions']:,} questions:"
                f" {m['accuracy']:.1%} ± {m['error']:.1%} right,"
                f" {m['accuracy_by_byte']:.1%} ± {m['error_by_byte']:.1%} by log-probability a byte"
            )
        if "exact_match" in task:
            m = task["exact_match"]
            out.append(
                f"  exact match, {m['questions']:,} questions:"
                f" {m['accuracy']:.1%} ± {m['error']:.1%} right"
            )
    return out
