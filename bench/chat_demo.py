"""Fine-tunes a small chat model on conversations about Python's standard library, and checks it.

    python -m bench.chat_demo MODEL OUT [--steps 20] [--seq-len 256] [--device cpu] [--dtype fp32]
        [--transformers PYTHON]

MODEL is a Hugging Face folder with tokenizer.json and a chat template (SmolLM2-135M-Instruct, which
tests/fixtures/make_smollm2.py makes from a wheel). The conversations are questions about modules,
classes and functions of this interpreter's standard library, answered by the first paragraph of
their docstrings (PSF licence); nothing is downloaded. OUT gets chat.jsonl, the stores, the run and
facts.json:

    supervised tokens  of the conversations as text, of the stores, and of all packed windows
    packed             largest difference of logits of samples in a packed window and alone
    loss               of the validation store before and after
    transformers       largest difference of logits of the export there and here (--transformers: a
                       Python that has it)
"""

import argparse
import importlib
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import Config
from llmq_nb.config_file import parse_config
from llmq_nb.core.rounding import to_float32
from llmq_nb.data.chat import ChatRenderer
from llmq_nb.data.loader import eval_batches
from llmq_nb.data.packing import IGNORE, Packing
from llmq_nb.data.store import TokenStore
from llmq_nb.data.tokenizer import Tokenizer, load_tokenizer
from llmq_nb.train.engine import load
from llmq_nb.train.inference import Inference, open_model
from llmq_nb.train.run import run
from llmq_nb.train.setup import inference_kind

MODULES = (
    *("json", "math", "statistics", "itertools", "functools", "collections", "pathlib", "shutil"),
    *("textwrap", "string", "random", "heapq", "bisect", "fractions", "decimal", "datetime"),
    *("calendar", "csv", "zipfile", "tarfile", "gzip", "hashlib", "hmac", "secrets", "inspect"),
    *("contextlib", "dataclasses", "enum", "types", "copy", "pprint", "re", "difflib", "struct"),
    *("os.path", "glob", "fnmatch", "tempfile", "argparse", "logging", "subprocess", "threading"),
    *("queue", "asyncio", "socket", "email", "html", "urllib.parse", "http.client", "unittest"),
)
Messages = list[dict[str, str]]
ASKED = "What does the exported model say?"


def conversations(count: int, longest: int = 500) -> Iterator[Messages]:
    """Questions and answers from docstrings, each at most `longest` characters; always the same."""
    made = 0
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
        for name in sorted(names):
            thing = getattr(module, name, None)
            if not (inspect.isroutine(thing) or inspect.isclass(thing)):
                continue
            answer = (inspect.getdoc(thing) or "").partition("\n\n")[0].strip()
            if not 20 <= len(answer) <= longest:
                continue
            kind = "class" if inspect.isclass(thing) else "function"
            question = f"What does Python's {kind} {module_name}.{name} do?"
            yield [
                {"role": "user", "content": question},
                {"role": "assistant", "content": " ".join(answer.split())},
            ]
            made += 1
            if made == count:
                return


def settings(model: Path, out: Path, arguments: argparse.Namespace) -> Config:
    """The run: whole conversations, only the assistant's words trained."""
    text = f"""
[run]
name = "chat-demo"
out_dir = "{out}/run"
device = "{arguments.device}"
[model]
path = "{model}"
[data]
sources = ["{out}/chat.jsonl"]
format = "chat"
packing = "pack"
train = "{out}/train.zarr"
validation = "{out}/validation.zarr"
[batch]
micro_batch = {arguments.micro_batch}
seq_len = {arguments.seq_len}
[precision]
dtype = "{arguments.dtype}"
[optimizer]
learning_rate = {arguments.rate}
weight_decay = 0.0
[schedule]
steps = {arguments.steps}
warmup_steps = {arguments.steps // 10}
[checkpoint]
every = 0
[eval]
every = 0
steps = 0
"""
    return parse_config(text, where="bench.chat_demo")


def supervised_as_text(talks: list[Messages], tokenizer: Tokenizer) -> int:
    """Supervised tokens of the conversations alone, before anything is stored or packed."""
    renderer = ChatRenderer(tokenizer)
    return sum(int(renderer.render(talk)[1][1:].sum()) for talk in talks)


def supervised_in_windows(store: TokenStore, seq_len: int) -> int:
    """Targets that train, over every packed window of the store."""
    packing = Packing(store, seq_len, "pack")
    blocks = (packing.read(block) for block in range(packing.blocks))
    return sum(int((windows.targets != IGNORE).sum()) for windows in blocks)


def packed_and_alone(
    inference: Inference, store: TokenStore, *, samples: int
) -> tuple[float, float, int]:
    """(largest difference of logits, largest logit, rows) of samples in a packed window and alone.

    inference: of one row. The window is the store's first, its first `samples` documents.
    """
    T = inference.config.batch.seq_len
    windows = Packing(store, T, "pack").read(0)
    tokens, starts = windows.tokens[:1], windows.segment_start[:1]
    begins = sorted(set(starts[0].tolist()))
    assert len(begins) > samples, "the window holds too few documents"
    packed = logits_of(inference, tokens, starts, 0, T)
    difference, size, rows = 0.0, 0.0, 0
    for begin, end in list(zip(begins, begins[1:], strict=False))[:samples]:
        alone = np.zeros_like(tokens)
        alone[0, : end - begin] = tokens[0, begin:end]
        own = logits_of(inference, alone, np.zeros_like(starts), 0, end - begin)
        difference = max(difference, float(np.abs(own - packed[begin:end]).max()))
        size, rows = max(size, float(np.abs(own).max())), rows + end - begin
    return difference, size, rows


def logits_of(
    inference: Inference,
    tokens: NDArray[np.int32],
    segment_start: NDArray[np.int32],
    first: int,
    end: int,
) -> NDArray[np.float32]:
    """Logits (end - first, V) of rows of one window."""
    model = inference.rank.model
    load(inference.rank, tokens, tokens, segment_start, None)
    model.embed()
    for layer in range(inference.model.L):
        model.forward(layer)
    V = inference.model.V
    rows = [inference.ops.read(model.logits_of(row))[:, :V] for row in range(first, end)]
    return to_float32(np.concatenate(rows))


def opened(place: Path, seq_len: int, micro_batch: int = 1) -> Inference:
    found = open_model(place)
    return Inference(
        found.model,
        micro_batch=micro_batch,
        seq_len=seq_len,
        base=found.precision,
        arrays=found.arrays,
        kind=inference_kind(found.precision, found.model),
    )


TRANSFORMERS = """
import sys, numpy as np, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    tokens = torch.from_numpy(np.load(sys.argv[2])).long()
    np.save(sys.argv[3], model(tokens).logits.float().numpy())
print(transformers.__version__, torch.__version__, model.dtype)
"""


def in_transformers(python: str, export: Path, tokens: NDArray[np.int32], out: Path) -> Any:
    """(logits, versions) of the export there."""
    np.save(out / "tokens.npy", tokens)
    names = [str(export), str(out / "tokens.npy"), str(out / "logits.npy")]
    env = {**os.environ, "PYTHONPATH": ""}
    command = [python, "-c", TRANSFORMERS, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return np.load(out / "logits.npy"), done.stdout.split()


def validation_loss(place: Path, store: TokenStore, seq_len: int) -> float:
    inference = opened(place, seq_len)
    loss, _ = inference.loss(eval_batches(store, 1, seq_len, None, packing="pack"))
    inference.eager.close()
    return loss


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--transformers", metavar="PYTHON")
    arguments = parser.parse_args(argv)
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(arguments.model)
    longest = 2 * arguments.seq_len  # characters: no conversation is cut
    talks = list(conversations(arguments.conversations, longest))
    lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    (out / "chat.jsonl").write_text(lines, encoding="utf-8")

    facts: dict[str, Any] = {"conversations": len(talks)}
    code = run(settings(arguments.model, out, arguments), resume="auto")
    assert code == 0
    stores = [TokenStore(out / f"{name}.zarr") for name in ("train", "validation")]
    facts["supervised"] = {
        "conversations": supervised_as_text(talks, tokenizer),
        "stores": sum(store.supervised for store in stores),
        "windows": sum(supervised_in_windows(s, arguments.seq_len) for s in stores),
    }
    export = out / "run/export"
    inference = opened(export, arguments.seq_len)
    difference, size, rows = packed_and_alone(inference, stores[0], samples=2)
    facts["packed"] = {"difference": difference, "largest_logit": size, "rows": rows}
    facts["loss"] = {
        "before": validation_loss(arguments.model, stores[1], arguments.seq_len),
        "after": validation_loss(export, stores[1], arguments.seq_len),
    }
    if arguments.transformers:
        ids = ChatRenderer(tokenizer).prompt([{"role": "user", "content": ASKED}])[None]
        theirs, versions = in_transformers(arguments.transformers, export, ids, out)
        padded = np.zeros((1, arguments.seq_len), np.int32)
        padded[:, : ids.size] = ids
        ours = logits_of(inference, padded, np.zeros_like(padded), 0, ids.size)
        largest = float(np.abs(theirs).max())
        facts["transformers"] = {
            "versions": versions,
            "difference": float(np.abs(theirs[0] - ours).max()),
            "largest_logit": largest,
        }
    assert all(math.isfinite(value) for value in facts["loss"].values())
    (out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts))
    return facts


if __name__ == "__main__":
    main()
    sys.exit(0)
