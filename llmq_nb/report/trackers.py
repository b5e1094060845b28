"""Experiment trackers beside log.jsonl: TensorBoard, Weights & Biases, trackio.

Each is an optional extra behind one small protocol. None of them asks anything: wandb writes
offline unless WANDB_MODE says otherwise or an API key is there (WANDB_API_KEY or an earlier login).
"""

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmq_nb.core.errors import UserError

PACKAGES = {"tensorboard": "tensorboard>=2.15", "wandb": "wandb>=0.17", "trackio": "trackio>=0.2"}
"""What the extra of the same name in pyproject.toml installs."""
PROJECT = "llmq-nb"


class TrackerWriter(Protocol):
    """Takes scalars by name, one call a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(
    names: Sequence[str],
    *,
    run_name: str,
    out_dir: Path,
    config: Mapping[str, Any],
    resumed_step: int = 0,
) -> list[TrackerWriter]:
    """A writer for each name in `log.trackers`; files go below out_dir.

    All packages are looked for before the first writer is made. Raises UserError with the command
    that installs a missing one.
    """
    modules = {name: _load(name) for name in names}
    makers = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
    return [
        makers[name](
            module, run_name=run_name, out_dir=out_dir, config=config, resumed_step=resumed_step
        )
        for name, module in modules.items()
    ]


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError, with the command that installs it, for a package that is missing."""
    for name in names:
        _load(name)


class TensorBoard:
    """Event files in out_dir/tensorboard."""

    def __init__(
        self,
        module: Any,
        *,
        run_name: str,
        out_dir: Path,
        config: Mapping[str, Any],
        resumed_step: int,
    ) -> None:
        self._proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = module.EventFileWriter(str(out_dir / "tensorboard"))
        if resumed_step:  # hides what an earlier start wrote for the steps to come
            session = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(resumed_step + 1, session_log=session)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [
            self._summary.Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in values.items()
        ]
        self._add(step, summary=self._summary.Summary(value=scalars))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._proto.Event(wall_time=time.time(), step=step, **content))


class Wandb:
    """A run of the project `llmq-nb` in out_dir/wandb; `wandb sync` uploads an offline one."""

    def __init__(
        self,
        module: Any,
        *,
        run_name: str,
        out_dir: Path,
        config: Mapping[str, Any],
        resumed_step: int,
    ) -> None:
        mode = os.environ.get("WANDB_MODE")
        if not mode:
            key = os.environ.get("WANDB_API_KEY") or getattr(
                getattr(module, "api", None), "api_key", None
            )
            mode = "online" if key else "offline"
        out_dir.mkdir(parents=True, exist_ok=True)
        self._run = module.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_name,
            dir=str(out_dir),
            config=dict(config),
            mode=mode,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of the project `llmq-nb` in trackio's local database."""

    def __init__(
        self,
        module: Any,
        *,
        run_name: str,
        out_dir: Path,
        config: Mapping[str, Any],
        resumed_step: int,
    ) -> None:
        resume = "allow" if resumed_step else "never"
        self._run = module.init(project=PROJECT, name=run_name, config=dict(config), resume=resume)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _load(name: str) -> Any:
    path = "tensorboard.summary.writer.event_file_writer" if name == "tensorboard" else name
    try:
        return importlib.import_module(path)
    except ImportError:
        raise UserError(
            f"the tracker {name!r} is not installed",
            where="log.trackers",
            mend=f"pip install '{PACKAGES[name]}'",
        ) from None
