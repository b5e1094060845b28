"""A run read back from its log.jsonl: columns of numbers, and what the report says besides.

Every table has the columns step, tokens_seen and hours, its horizontal axes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError
from llmq_nb.report.jsonl import read_log

Column = NDArray[np.float64]
Table = dict[str, Column]
Record = dict[str, Any]
GIB = 2**30
STEP_KEYS = ("step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "lse_max")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What is told of a run: one float64 array a quantity, NaN where a record has none."""

    name: str
    steps: Table
    """loss, learning_rate, grad_norm, tokens_per_second, lse_max, seconds, mfu [%] by record."""
    evaluations: Table
    """loss by evaluation."""
    health: Table
    """underflowed, saturated by FP8 health record: of the worst tensor [%]."""
    devices: Table
    """power [W] and pcie_sent, pcie_received [GB/s] of all GPUs; of the worst one memory [GiB],
    clock [MHz], temperature [C], and throttled [%]: whether any was."""
    facts: Record
    """Of the start: device_name, parameters, planned_bytes, ... as far as they were logged."""
    toml: str
    """The resolved config; empty where none was logged."""
    throttle_reasons: dict[str, int]
    """Samples of GPUs by why their clocks were held down."""
    last_health: tuple[Record, ...]
    """The tensors of the last FP8 health record."""
    events: tuple[tuple[str, int | None, str], ...]
    """(time, step, what happened)."""

    @property
    def summary(self) -> dict[str, str]:
        """The final figures, as text by heading."""
        loss, evals = self.steps["loss"], self.evaluations["loss"]
        seconds = np.nansum(self.steps["seconds"])
        out = {
            "run": self.name,
            "steps": f"{self.steps['step'][-1]:,.0f}",
            "tokens": f"{self.steps['tokens_seen'][-1]:,.0f}",
            "loss (mean of the last 10)": _figure(_mean(loss[-10:])),
            "validation loss": "none",
            "best validation loss": "none",
            "tokens/s (median)": _figure(_median(self.steps["tokens_per_second"]), ",.0f"),
            "training time": f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds:.0f} s",
        }
        if np.isfinite(evals).any():
            best = int(np.nanargmin(evals))
            out["validation loss"] = _figure(float(evals[-1]))
            at = f" (step {self.evaluations['step'][best]:,.0f})"
            out["best validation loss"] = _figure(float(evals[best])) + at
        return out

    @property
    def details(self) -> dict[str, str]:
        """More figures, for a page that has room; empty text where nothing is known."""
        out = {"device": str(self.facts.get("device_name") or self.facts.get("device") or "")}
        count, planned = self.facts.get("parameters"), self.facts.get("planned_bytes")
        out["parameters"] = f"{count:,}" if count else ""
        out["planned memory"] = f"{planned / GIB:.2f} GiB" if planned else ""
        used = self.devices["memory"]
        out["memory in use, most"] = f"{np.nanmax(used):.2f} GiB" if np.isfinite(used).any() else ""
        mfu = _median(self.steps["mfu"])
        out["MFU (median)"] = f"{mfu:.1f} %" if math.isfinite(mfu) else ""
        reasons = self.throttle_reasons.items()
        out["throttled by (samples)"] = ", ".join(f"{name} {count}" for name, count in reasons)
        out["updates left out"] = f"{int(np.nansum(self.steps['skipped'])):,}"
        return out


def load_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """The runs, by distinct names. Raises UserError as `load_run` does, and where there is none."""
    if not run_dirs:
        raise UserError("no run to plot", mend="give the folder of at least one run")
    names = _names([Path(d) for d in run_dirs])
    return [load_run(Path(d), name) for d, name in zip(run_dirs, names, strict=True)]


def load_run(path: Path, name: str) -> Run:
    """A run's folder, or its log file. Raises UserError: no such run, a log without steps."""
    log = path / "log.jsonl" if path.is_dir() else path
    if not log.is_file():
        raise UserError(f"no such run: {path}", mend="give a run's folder, with its log.jsonl")
    records = read_log(log)

    def kind(name: str) -> list[Record]:
        return [r for r in records if r.get("log") == name]

    if not kind("step"):
        raise UserError(f"nothing to plot: no step is logged in {log}", mend="train a step first")
    facts = _facts(kind("info"))
    steps = _steps(kind("step"), facts)
    health = [r for r in kind("health") if r.get("tensors")]
    return Run(
        name=name,
        steps=steps,
        evaluations=_beside(kind("eval"), steps, {"loss": lambda r: r.get("loss")}),
        health=_beside(health, steps, {k: _worst(k) for k in ("underflowed", "saturated")}),
        devices=_beside(kind("device"), steps, DEVICE_COLUMNS),
        facts=facts,
        throttle_reasons=_throttle_reasons(kind("device")),
        toml=next((str(r.get("toml", "")) for r in reversed(kind("config"))), ""),
        last_health=tuple(health[-1]["tensors"]) if health else (),
        events=tuple(_events(records)),
    )


def _steps(records: list[Record], facts: Record) -> Table:
    table = {key: _column(records, key) for key in (*STEP_KEYS, "seconds", "tokens", "skipped")}
    # a record stands for the steps since the one before it (log.every)
    made = np.diff(table["step"], prepend=0.0)
    table["tokens_seen"] = np.cumsum(np.nan_to_num(table.pop("tokens") * made))
    table["seconds"] *= made
    table["hours"] = np.cumsum(np.nan_to_num(table["seconds"])) / 3600
    peak = facts.get("peak_tokens_per_second") or math.nan
    table["mfu"] = 100 * table["tokens_per_second"] / peak
    return table


def _beside(records: list[Record], steps: Table, columns: dict[str, Callable[[Record], Any]]):
    """A table of other records, its axes read off the steps."""
    table = {key: _numbers([get(r) for r in records]) for key, get in columns.items()}
    table["step"] = _column(records, "step")
    for axis in ("tokens_seen", "hours"):
        table[axis] = np.interp(table["step"], steps["step"], steps[axis], left=0.0)
    return table


def _worst(key: str) -> Callable[[Record], Any]:
    def get(record: Record) -> float:
        return 100 * float(_column(record["tensors"], key).max())

    return get


def _over_devices(
    key: str, join: Callable[[list[float]], float], unit: float = 1.0
) -> Callable[[Record], Any]:
    def get(record: Record) -> float | None:
        values = [d.get(key) for d in record.get("devices", ())]
        numbers = [float(v) for v in values if isinstance(v, int | float)]
        return join(numbers) / unit if numbers else None

    return get


def _throttled(record: Record) -> float | None:
    """100 where a GPU's clocks were held down."""
    known = [d["throttled"] for d in record.get("devices", ()) if d.get("throttled") is not None]
    return 100.0 * any(known) if known else None


DEVICE_COLUMNS: dict[str, Callable[[Record], Any]] = {
    "memory": _over_devices("memory", max, GIB),
    "power": _over_devices("power", sum),
    "clock": _over_devices("sm_clock", min),
    "temperature": _over_devices("temperature", max),
    "throttled": _throttled,
    "pcie_sent": _over_devices("pcie_sent", sum, 1e9),
    "pcie_received": _over_devices("pcie_received", sum, 1e9),
}


def _throttle_reasons(records: list[Record]) -> dict[str, int]:
    """How many samples of the GPUs were throttled, by reason."""
    found: dict[str, int] = {}
    for device in (d for r in records for d in r.get("devices", ())):
        for reason in device.get("throttled") or ():
            found[reason] = found.get(reason, 0) + 1
    return found


def _facts(infos: list[Record]) -> Record:
    """The values of the last start: those of the info record that has a device."""
    own = ("log", "time", "message")
    starts = [r for r in infos if "planned_bytes" in r]
    return {k: v for k, v in starts[-1].items() if k not in own} if starts else {}


def _events(records: list[Record]):
    for r in records:
        time, step = str(r.get("time", "")), r.get("step")
        if r.get("log") == "info":
            yield time, step, str(r.get("message", ""))
        elif r.get("log") == "cmd":
            yield time, None, "$ llmq-nb " + " ".join(map(str, r.get("argv", ())))
        elif r.get("log") == "checkpoint":
            yield time, step, f"checkpoint {r.get('path')}"
        elif r.get("log") == "step" and r.get("skipped"):
            tensor = r.get("non_finite_tensor")
            why = "the loss had jumped" if r.get("spike") else "no supervised token"
            why = f"the gradient of {tensor} is not finite" if tensor else why
            yield time, step, f"no update: {why}"


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, or their whole paths where two are the same."""
    folders = [(p if p.is_dir() else p.parent).resolve() for p in paths]
    short = [folder.name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _column(records: Sequence[Record], key: str) -> Column:
    return _numbers([r.get(key) for r in records])


def _numbers(values: Sequence[Any]) -> Column:
    return np.array([v if isinstance(v, int | float) else math.nan for v in values], np.float64)


def _mean(values: Column) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _median(values: Column) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def _figure(value: float, form: str = ".4f") -> str:
    return format(value, form) if math.isfinite(value) else "not finite"
