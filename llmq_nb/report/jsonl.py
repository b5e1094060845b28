"""log.jsonl: one JSON object a line, every line strict JSON after every write.

    {"log": "step", "time": "2026-01-31T12:00:00.123+00:00", "step": 7, "loss": 2.5, ...}

Kinds: cmd, config, step, health, device, eval, checkpoint, info. JSON has no NaN and no infinity:
such a value is null, and beside it `<key>_text` says which. A line is one write to a file opened
for appending, so a reader sees whole lines; what a crash leaves of the last one goes when the log
is opened again.
"""

import dataclasses
import datetime
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.core.files import atomic_file, remove_torn
from llmq_nb.report.metrics import DeviceMetrics, EvalMetrics, HealthMetrics, StepMetrics


class JsonlLog:
    """The log of one run, appended to.

    resumed_step: optimizer steps done when the run (re)starts; records of later steps are dropped,
    they will be made again. The file is rewritten only where something is to be dropped, and then
    replaced in one piece. Raises UserError where the file cannot be written.
    """

    def __init__(self, path: Path, *, resumed_step: int = 0) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _keep_until(path, resumed_step)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"cannot write {path}", mend=error.strerror or str(error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; again is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def cmd(self, argv: Sequence[str]) -> None:
        """The command line of this start of the run."""
        self.write("cmd", argv=list(argv))

    def config(self, toml: str) -> None:
        """The resolved config, as TOML text."""
        self.write("config", toml=toml)

    def step(self, metrics: StepMetrics) -> None:
        self.write("step", **dataclasses.asdict(metrics))

    def health(self, metrics: HealthMetrics) -> None:
        self.write("health", **dataclasses.asdict(metrics))

    def device(self, metrics: DeviceMetrics) -> None:
        self.write("device", **dataclasses.asdict(metrics))

    def evaluation(self, metrics: EvalMetrics) -> None:
        self.write("eval", **dataclasses.asdict(metrics))

    def checkpoint(self, step: int, path: Path, seconds: float) -> None:
        self.write("checkpoint", step=step, path=path, seconds=seconds)

    def info(self, message: str, **values: Any) -> None:
        """Anything else that happened, in words and values."""
        self.write("info", message=message, **values)

    def write(self, log: str, **values: Any) -> None:
        """One record. Raises MachineError if the disk does not take it; no half line stays."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = _line({"log": log, "time": time, **values})
        end = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, end)
            raise MachineError(f"cannot write {self.path}: {error.strerror or error}") from error


class NoLog(JsonlLog):
    """Writes nothing: what all processes of a run but the first have."""

    def __init__(self) -> None:
        self.path, self._file = Path(os.devnull), -1

    def write(self, log: str, **values: Any) -> None:
        pass


def read_log(path: Path, *, every_attempt: bool = False) -> list[dict[str, Any]]:
    """The records in order; of a step made twice only the last, unless every attempt is wanted.

    Lines that are not JSON objects (the last one of a run that was killed) are left out. Raises
    UserError where there is no log.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no such file: {path}", mend="a run that has begun has one") from None
    except OSError as error:
        raise UserError(f"cannot read {path}", mend=error.strerror or str(error)) from None
    records = [record for record, _ in _records(data)]
    if every_attempt:
        return records
    last = {_identity(record, index): index for index, record in enumerate(records)}
    return [records[index] for index in sorted(last.values())]


def _identity(record: Mapping[str, Any], index: int) -> tuple[Any, ...]:
    """What is the same for two records of one event."""
    step = record.get("step")
    repeats = record.get("log") in ("step", "health", "device", "eval", "checkpoint")
    return (record["log"], step) if repeats and isinstance(step, int) else (index,)


def _records(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """(record, its line) of every complete line that is a JSON object."""
    for line in data.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and line.endswith(b"\n"):
            yield record, line


def _keep_until(path: Path, step: int) -> None:
    """Drop torn lines and the records of later steps."""
    remove_torn(path)
    data = path.read_bytes()
    kept = b"".join(
        line
        for record, line in _records(data)
        if not (isinstance(record.get("step"), int) and record["step"] > step)
    )
    if kept == data:
        return
    with atomic_file(path) as file:
        file.write(kept)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(_strict(record), allow_nan=False, default=_plain).encode() + b"\n"


def _strict(value: Any) -> Any:
    """The value with NaN and infinities as null, and `<key>_text` beside those of an object."""
    if isinstance(value, Mapping):
        out: dict[str, Any] = {}
        for key, item in value.items():
            out[str(key)] = _strict(item)
            text = _non_finite(item)
            if text:
                out[f"{key}_text"] = text
        return out
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, str):  # a file name may hold bytes that are no text
        return value.encode("utf-8", "replace").decode()
    if _non_finite(value):
        return None
    return value


def _non_finite(value: Any) -> str:
    """nan, inf or -inf; empty for everything else."""
    value = _plain(value) if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else ""


def _plain(value: Any) -> Any:
    """NumPy scalars as Python's, everything else (paths) as text."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else str(value)
