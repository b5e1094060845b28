"""Loss curves of BF16 and FP8 training from scratch on real text: one model, one seed, one order.

    python -m bench.fp8_curves store  --out DIR                   text of this machine, tokenized
    python -m bench.fp8_curves train  --out DIR --run e4m3        one run of RUNS, to DIR/e4m3
    python -m bench.fp8_curves report --out DIR                   curves.json, curves.png, figures

The text is the Python sources, headers and documents of this Python, its packages and the system,
each file once, by bytes; a fiftieth of the files is held out. Runs are apart so that each can be
timed and repeated; one that is cut short still has its log. `--stop n` ends a run after n steps of
the same schedule. `halves`, `quarters` and `eighths` are e4m3 with its batches in so many
micro-batches: other absmax, other sums. How far they stray from each other is the noise that
emulation is held against.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb import Trainer
from llmq_nb.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    MemoryConfig,
    ModelSection,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)
from llmq_nb.data.store_writer import StoreWriter
from llmq_nb.data.tokenizer import load_tokenizer, tokenizer_info
from llmq_nb.report.jsonl import JsonlLog, read_log

RUNS: dict[str, dict[str, Any]] = {
    "bf16": {"matmul": "bf16"},
    "e4m3": {"matmul": "e4m3"},
    "e5m2-gradient": {"matmul": "e4m3", "gradient": "e5m2"},
    "emulated": {"matmul": "e4m3", "fp8_units": "emulate"},
    "halves": {"matmul": "e4m3"},
    "quarters": {"matmul": "e4m3"},
    "eighths": {"matmul": "e4m3"},
}
PARTS = {"halves": 2, "quarters": 4, "eighths": 8}
"""Micro-batches that a batch of the run is cut into."""
WHOLE = ("bf16", "e4m3", "e5m2-gradient")
TOKENS = 50_000_000
MEGABYTES, LEAST_MEGABYTES = 66, 60
ENDINGS = {".py", ".pyi", ".h", ".hpp", ".cuh", ".md", ".rst", ".txt"}
MOST_BYTES = 1 << 20
"""Of a file: larger ones are tables."""
HELD_OUT = 50
"""One document in so many is held out."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batches. eval_every, eval_steps: of the validation loss."""

    C: int
    F: int
    L: int
    H: int
    G: int
    D: int
    micro_batch: int
    seq_len: int
    warm_up: int
    eval_every: int
    eval_steps: int
    learning_rate: float = 1e-3


BASE = Size(768, 2560, 12, 12, 4, 64, 32, 1024, 100, 250, 16)  # 90 M parameters
TINY = Size(64, 96, 2, 2, 1, 32, 4, 32, 5, 10, 2)  # for a try on the cpu


# ---- text --------------------------------------------------------------------------------------
def documents(roots: Sequence[Path]) -> Iterator[tuple[bytes, str]]:
    """(sha256, text) of every text file, each content once, in the order of their paths."""
    seen: set[bytes] = set()
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(files):
                path = Path(folder, name)
                if path.suffix not in ENDINGS or path.is_symlink():
                    continue
                try:
                    content = path.read_bytes()
                    text = content.decode("utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                digest = hashlib.sha256(content).digest()
                if 200 <= len(content) <= MOST_BYTES and digest not in seen:
                    seen.add(digest)
                    yield digest, text


def text_roots() -> list[Path]:
    """Where this Python and its packages keep their text."""
    system = ("/usr/share/doc", "/usr/include", "/usr/lib/python3")
    roots = {Path(p) for p in (sys.prefix, sys.base_prefix, *sys.path, *system) if p}
    found = sorted({root.resolve() for root in roots if root.is_dir()}, key=str)
    return [root for root in found if not any(other in root.parents for other in found)]


def make_store(out: Path, megabytes: float) -> None:
    """DIR/train.zarr and DIR/validation.zarr: documents in the order of their hashes."""
    if (out / "store.json").exists():
        print((out / "store.json").read_text())
        return
    chosen, size = [], 0
    for document in sorted(documents(text_roots())):
        chosen.append(document)
        size += len(document[1].encode())
        if size >= megabytes * 1e6:
            break
    least = min(megabytes, LEAST_MEGABYTES)
    if size < least * 1e6:
        raise SystemExit(f"only {size / 1e6:.0f} MB of text on this machine, {least} needed")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer("bytes")
    end = np.array([tokenizer.special_ids["<|endoftext|>"]], np.int32)
    facts: dict[str, Any] = {"megabytes": round(size / 1e6, 1)}
    for name in ("train", "validation"):
        tokens = 0
        with StoreWriter(out / f"{name}.zarr", tokenizer_info(tokenizer)) as writer:
            for digest, text in chosen:
                if (digest[-1] % HELD_OUT == 0) == (name == "validation"):
                    ids = np.concatenate([tokenizer.encode(text), end])
                    writer.append(ids)
                    tokens += ids.size
        facts[f"{name}_tokens"] = tokens
    (out / "store.json").write_text(json.dumps(facts))
    print(json.dumps(facts))


# ---- training ----------------------------------------------------------------------------------
def write_model(folder: Path, size: Size) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": size.C,
        "intermediate_size": size.F,
        "num_hidden_layers": size.L,
        "num_attention_heads": size.H,
        "num_key_value_heads": size.G,
        "head_dim": size.D,
        "vocab_size": 272,
        "max_position_embeddings": size.seq_len,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
    }
    (folder / "config.json").write_text(json.dumps(model))


def make_config(out: Path, name: str, size: Size, tokens: int, device: Any) -> Config:
    parts = PARTS.get(name, 1)
    return Config(
        run=RunConfig(name=name, out_dir=str(out / name), device=device),
        model=ModelSection(path=str(out / "model"), init="random"),
        data=DataConfig(
            train=str(out / "train.zarr"),
            validation=str(out / "validation.zarr"),
            tokenizer="bytes",
        ),
        batch=BatchConfig(
            micro_batch=size.micro_batch // parts, grad_accumulation=parts, seq_len=size.seq_len
        ),
        precision=PrecisionConfig(**RUNS[name]),
        optimizer=OptimizerConfig(learning_rate=size.learning_rate),
        schedule=ScheduleConfig(
            steps=-(-tokens // (size.micro_batch * size.seq_len)), warmup_steps=size.warm_up
        ),
        memory=MemoryConfig(),
        checkpoint=CheckpointConfig(every=0),
        eval=EvalConfig(every=size.eval_every, steps=size.eval_steps * parts),
        log=LogConfig(health_every=size.eval_every),
    )


def train(out: Path, name: str, size: Size, tokens: int, stop: int | None, device: Any) -> None:
    """One run without checkpoints: its log.jsonl, with a validation loss on all of the store at the
    end of the schedule."""
    write_model(out / "model", size)
    config = make_config(out, name, size, tokens, device)
    log_path = out / name / "log.jsonl"
    log_path.unlink(missing_ok=True)
    begun = time.perf_counter()
    with Trainer(config, resume="none") as trainer, JsonlLog(log_path) as log:
        log.info("ready", seconds=time.perf_counter() - begun)
        last = min(trainer.total_steps, stop or trainer.total_steps)
        while trainer.progress.step < last:
            metrics = trainer.step()
            log.step(metrics)
            if trainer.health is not None:
                log.health(trainer.health)
            if metrics.step % size.eval_every == 0 or metrics.step == last:
                if trainer.finished:  # the final figure is of the whole store
                    whole = dataclasses.replace(config.eval, steps=0)
                    trainer.config = dataclasses.replace(config, eval=whole)
                found = trainer.evaluate()
                assert found is not None
                log.evaluation(found)
                print(
                    f"{name} step {metrics.step}/{last}: loss {metrics.loss:.4f}, validation "
                    f"{found.loss:.4f}, {metrics.tokens_per_second:,.0f} tokens/s, "
                    f"{time.perf_counter() - begun:.0f} s",
                    flush=True,
                )


# ---- report ------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Curve:
    """Training losses by step, and (tokens, loss) of the evaluations; tokens a step."""

    losses: NDArray[np.float64]
    evaluations: NDArray[np.float64]
    tokens: int
    tokens_per_second: float

    @property
    def smooth(self) -> NDArray[np.float64]:
        """Mean over the last 50 steps (fewer at the start)."""
        sums = np.concatenate([[0.0], np.cumsum(self.losses)])
        end = np.arange(1, len(self.losses) + 1)
        begin = np.maximum(end - 50, 0)
        return (sums[end] - sums[begin]) / (end - begin)


def load_curve(log: Path) -> Curve | None:
    if not log.exists():
        return None
    records = read_log(log)
    steps = [r for r in records if r["log"] == "step"]
    if not steps:
        return None
    tokens = steps[0]["tokens"]
    evaluations = [(r["step"] * tokens, r["loss"]) for r in records if r["log"] == "eval"]
    rates = [s["tokens_per_second"] for s in steps]
    return Curve(
        np.array([s["loss"] for s in steps], np.float64),
        np.array(evaluations, np.float64).reshape(-1, 2),
        tokens,
        float(np.median(rates)),
    )


def difference(a: Curve, b: Curve) -> NDArray[np.float64]:
    """100 (a / b - 1) of the smoothed losses, over the steps both have."""
    n = min(len(a.losses), len(b.losses))
    return 100 * (a.smooth[:n] / b.smooth[:n] - 1)


def figures(curves: dict[str, Curve]) -> dict[str, Any]:
    """The final figures: by run, relative to BF16, and the short runs' distances from e4m3."""
    out: dict[str, Any] = {}
    for name, c in curves.items():
        out[name] = {
            "steps": len(c.losses),
            "tokens": len(c.losses) * c.tokens,
            "final_validation_loss": float(c.evaluations[-1, 1]) if len(c.evaluations) else None,
            "final_training_loss": float(c.smooth[-1]),
            "tokens_per_second": c.tokens_per_second,
        }
    base = curves.get("bf16")
    for name in WHOLE[1:]:
        c = curves.get(name)
        if base is None or c is None or len(c.losses) != len(base.losses):
            continue
        out[name]["training_percent_of_bf16"] = float(difference(c, base)[-1])
        if len(c.evaluations) and len(base.evaluations):
            ratio = c.evaluations[-1, 1] / base.evaluations[-1, 1]
            out[name]["validation_percent_of_bf16"] = float(100 * (ratio - 1))
    alike = [curves[name] for name in ("e4m3", *PARTS) if name in curves]
    if "emulated" in curves and len(alike) > 1:
        out["emulated"] |= emulation(curves["emulated"], alike)
    return out


def emulation(emulated: Curve, alike: Sequence[Curve]) -> dict[str, Any]:
    """Emulation beside runs on FP8 units that differ by rounding alone, over the steps all have.

    Shares of their mean in percent: early, of the first 40 steps, where nothing has grown yet; and
    of the last 50. noise: their sample standard deviation.
    """
    n = min(len(c.losses) for c in (emulated, *alike))
    out: dict[str, Any] = {"compared_steps": n, "noise_runs": len(alike)}
    for name, part in (("early", slice(0, 40)), ("last", slice(max(n - 50, 0), n))):
        theirs = np.array([c.losses[part].mean() for c in alike])
        mean = theirs.mean()
        out[f"{name}_percent"] = float(100 * (emulated.losses[part].mean() / mean - 1))
        out[f"{name}_noise_percent"] = float(100 * theirs.std(ddof=1) / mean)
    return out


def draw(curves: dict[str, Curve], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    base = curves.get("bf16")
    for i, name in enumerate(n for n in WHOLE if n in curves):
        c, style = curves[name], {"color": f"C{i}", "linewidth": 1.3}
        millions = np.arange(1, len(c.losses) + 1) * c.tokens / 1e6
        upper.plot(millions, c.smooth, label=f"{name}, training", **style)
        points = {"color": f"C{i}", "marker": "o", "markersize": 4, "markerfacecolor": "white"}
        if len(c.evaluations):
            x, y = c.evaluations.T
            upper.plot(x / 1e6, y, linestyle="--", label=f"{name}, validation", **points)
        if base is not None and name != "bf16":
            change = difference(c, base)
            lower.plot(millions[: len(change)], change, label=f"{name}, training", **style)
            n = min(len(c.evaluations), len(base.evaluations))
            ratio = 100 * (c.evaluations[:n, 1] / base.evaluations[:n, 1] - 1)
            lower.plot(
                c.evaluations[:n, 0] / 1e6, ratio, linestyle="--", label=f"{name}, validation",
                **points,
            )  # fmt: skip
    upper.set_ylabel("loss [nats per byte]")
    if base is not None:  # without the first steps, which would flatten everything else
        upper.set_ylim(top=float(base.smooth[len(base.smooth) // 20]) * 1.05)
    lower.set_ylabel("difference to bf16 [%]")
    lower.set_ylim(-1.5, 1.5)
    lower.axhline(0, color="black", linewidth=0.8)
    lower.axhspan(-0.5, 0.5, color="black", alpha=0.06)
    lower.set_xlabel("tokens [millions]")
    for panel in (upper, lower):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, ncols=1 if panel is upper else 2)
    figure.savefig(path, dpi=120)


def report(out: Path) -> None:
    """curves.json, curves.png and one line a run."""
    loaded = {name: load_curve(out / name / "log.jsonl") for name in RUNS}
    curves = {name: c for name, c in loaded.items() if c is not None}
    if not curves:
        raise SystemExit(f"no run in {out}")
    found = figures(curves)
    series = {
        name: {
            "tokens_per_step": c.tokens,
            "losses": [round(float(v), 5) for v in c.losses],
            "validation": [[int(x), round(float(y), 5)] for x, y in c.evaluations],
        }
        for name, c in curves.items()
    }
    (out / "curves.json").write_text(json.dumps({"figures": found, "curves": series}))
    draw(curves, out / "curves.png")
    for name, values in found.items():
        print(json.dumps({"run": name, **values}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("command", choices=["store", "train", "report"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", choices=list(RUNS))
    parser.add_argument("--megabytes", type=float, default=MEGABYTES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--tiny", action="store_true", help="a small model, for the cpu")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="cuda")
    a = parser.parse_args()
    if a.command == "store":
        make_store(a.out, a.megabytes)
    elif a.command == "report":
        report(a.out)
    elif a.run is None:
        parser.error("train needs --run")
    else:
        train(a.out, a.run, TINY if a.tiny else BASE, a.tokens, a.stop, a.device)


if __name__ == "__main__":
    main()
