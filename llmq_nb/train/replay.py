"""Makes one step of a run again, the same data and random bits, and looks at every tensor of it.

It begins at the newest checkpoint before the step (or at the start) and trains up to it, policies
of bad steps included, writing nothing. Steps are launched one by one, which gives the same bits as
replayed graphs.
"""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq_nb.config import Config
from llmq_nb.config_file import load_config
from llmq_nb.core.errors import UserError
from llmq_nb.report.jsonl import read_log
from llmq_nb.report.metrics import StepMetrics
from llmq_nb.train.checking import BadTensor, CheckingOps
from llmq_nb.train.checkpoint import newest_checkpoint
from llmq_nb.train.policy import Policy
from llmq_nb.train.trainer import CHECKPOINTS, Trainer


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """What a step did when it was made again.

    begin: the step of the checkpoint that it began at. logged: (loss, grad_norm) of every time the
    run made the step, as far as its log has them.
    """

    metrics: StepMetrics
    bad: BadTensor | None
    begin: int
    logged: tuple[tuple[float | None, float | None], ...]

    @property
    def same_bits(self) -> bool | None:
        """Whether loss and norm are those of the log, bit for bit; None: nothing is logged."""
        ours = tuple(x if abs(x) < float("inf") else None for x in self._numbers)
        return ours in self.logged if self.logged else None

    @property
    def _numbers(self) -> tuple[float, float]:
        return self.metrics.loss, self.metrics.grad_norm


def replay(run_dir: Path, step: int, announce: Callable[[str], None]) -> Replay:
    """Make step `step` (the first is 1) of a run's folder again.

    Raises UserError: no run there, or no such step.
    """
    config = replay_config(run_dir)
    if step < 1:
        raise UserError(f"{step}", where="--step", mend="the first step is 1")
    begin = newest_checkpoint(run_dir / CHECKPOINTS, step - 1)
    resume = "start" if begin is None else str(begin)
    with (
        # NumPy warns of what is told better here, in whatever thread it is
        warnings.catch_warnings(action="ignore", category=RuntimeWarning),
        Trainer(config, resume=resume, announce=announce) as trainer,
    ):
        if step > trainer.total_steps:
            mend = f"the run has {trainer.total_steps} steps"
            raise UserError(f"{step}", where="--step", mend=mend)
        first = trainer.progress.step
        policy = Policy(trainer, announce)
        while trainer.progress.step < step - 1:
            policy.after(trainer.step())
        checkers = watch(trainer)
        metrics = trainer.step()
    bad = next((c.found for c in checkers if c.found is not None), None)
    return Replay(metrics, bad, first, logged(run_dir / "log.jsonl", step))


def replay_config(run_dir: Path) -> Config:
    """The resolved config of a run's folder, changed so that it is launched step by step there."""
    path = run_dir / "config.toml"
    if not path.is_file():
        raise UserError(f"no run in {run_dir}", mend="give a run's folder, with its config.toml")
    config = load_config(path)
    p = config.parallel
    ranks = (p.devices or (0,)) * p.machines  # those of other machines too: the bits are the same
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(p, devices=ranks, machines=1),
        run=dataclasses.replace(config.run, out_dir=str(run_dir), cuda_graphs=False),
        log=dataclasses.replace(config.log, trackers=(), health_every=0),
    )


def watch(trainer: Trainer) -> list[CheckingOps]:
    """From now on every operation of the trainer's ranks is checked."""
    engine: Any = trainer.engine
    checkers = []
    for rank in engine.ranks:
        rank.model.ops = CheckingOps(rank.model.ops)
        checkers.append(rank.model.ops)
    return checkers


def logged(path: Path, step: int) -> tuple[tuple[float | None, float | None], ...]:
    """(loss, grad_norm) of each record of the step; None is NaN or infinite."""
    if not path.is_file():
        return ()
    records = read_log(path, every_attempt=True)
    found = [r for r in records if r.get("log") == "step" and r.get("step") == step]
    return tuple((r.get("loss"), r.get("grad_norm")) for r in found)
