"""A whole training run: the loop with evaluation, checkpoints, logs and signals, and its end.

A run's folder holds config.toml (resolved), log.jsonl, checkpoints/, export/ (a Hugging Face
folder) and loss.png. Evaluation comes before the checkpoint of the same step, so a resumed run logs
the same lines.
"""

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from llmq_nb.comm.cluster import Cluster
from llmq_nb.config import Config
from llmq_nb.config_file import to_toml
from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.core.files import atomic_file, remove_torn
from llmq_nb.report.console import Console, announce
from llmq_nb.report.device import DeviceMonitor
from llmq_nb.report.jsonl import JsonlLog, NoLog, read_log
from llmq_nb.report.metrics import HealthMetrics, StepMetrics
from llmq_nb.report.trackers import TrackerWriter, check_trackers, open_trackers
from llmq_nb.train.eager import shared_weights, weight_arrays
from llmq_nb.train.facts import start_facts, watch_devices
from llmq_nb.train.generation import Generator, Sampling
from llmq_nb.train.policy import Policy
from llmq_nb.train.signals import Signals, Stopped
from llmq_nb.train.trainer import Trainer

SAMPLE_TOKENS = 300
"""Most tokens of the text that is printed at the end."""
SAMPLE_TEMPERATURE = 0.8


def run(
    config: Config,
    *,
    resume: str | Literal["auto", "none"] = "auto",
    argv: Sequence[str] = (),
    cluster: Cluster | None = None,
) -> int:
    """Train until the last step or a signal; returns the exit code (0, or 128 + signal).

    cluster: the processes of several machines; the first one writes, the others only train.
    """
    cluster = cluster or Cluster()
    if cluster.leads:
        check_run(config)
    last: Path | None = None
    at_once = False
    with (
        Signals() as signals,
        only_run_in(Path(config.out_dir), locks=cluster.leads) as claim,
        cluster.guard(),
        contextlib.ExitStack() as stack,
    ):
        try:
            with signals.at_once():
                trainer = stack.enter_context(Trainer(config, resume=resume, cluster=cluster))
            stack.enter_context(cluster.guard())  # others hear of an error before it cleans up
            if cluster.leads:
                trainer.make_out_dir()
            claim()
            last = _train(trainer, signals, argv)
            if signals.received is None:
                with signals.at_once():
                    leave(trainer, last)
        except Stopped:
            at_once = True
        if signals.received is not None:
            where = "no step was made" if last is None else f"checkpoint: {last}"
            announce(f"stopped by signal {signals.received}; {where}")
            if at_once and cluster.several:  # the others may be anywhere: they end by this
                raise SystemExit(signals.exit_code)
    return signals.exit_code


def _train(trainer: Trainer, signals: Signals, argv: Sequence[str]) -> Path | None:
    """The remaining steps, logged; the newest checkpoint."""
    config = trainer.config  # resolved
    if not trainer.cluster.leads:
        return Loop(trainer, NoLog(), (), signals).run()
    remove_torn(trainer.out_dir / "config.toml")
    with atomic_file(trainer.out_dir / "config.toml") as file:
        file.write(to_toml(config).encode())
    done = trainer.progress.step
    trackers = open_trackers(
        config.log.trackers,
        run_name=config.run.name,
        out_dir=trainer.out_dir,
        config=dataclasses.asdict(config),
        resumed_step=done,
    )
    with JsonlLog(trainer.out_dir / "log.jsonl", resumed_step=done) as log:
        log.cmd(argv)
        log.config(to_toml(config))
        log.info(trainer.device.reason, **start_facts(trainer))
        with watch_devices(trainer, log) as monitor:
            try:
                return Loop(trainer, log, trackers, signals, monitor).run()
            finally:
                for tracker in trackers:
                    tracker.close()


@contextlib.contextmanager
def only_run_in(folder: Path, *, locks: bool = True) -> Iterator[Callable[[], None]]:
    """Locks the run's folder if it is there, else when the function handed over is called; does
    nothing unless it `locks`.

    Raises UserError where another process trains in it: two would mix their logs and checkpoints.
    The kernel drops the lock with the process; where folders cannot be locked there is none.
    """
    handles: list[int] = []

    def claim() -> None:
        if not locks or handles or not folder.is_dir():
            return
        handles.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        try:
            fcntl.flock(handles[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mend = "wait for it, or choose another run.name"
            raise UserError("another process is training", where=str(folder), mend=mend) from None
        except OSError:
            pass

    try:
        claim()
        yield claim
    finally:
        for handle in handles:
            os.close(handle)


def check_run(config: Config) -> None:
    """Raise UserError for what only the whole run needs, before any work."""
    check_trackers(config.log.trackers)
    if config.log.sample is not None and not config.log.sample.strip():
        raise UserError("empty prompt", where="log.sample", mend="give a prompt, or leave it out")


class Loop:
    """The steps of one run, and what happens between them."""

    def __init__(
        self,
        trainer: Trainer,
        log: JsonlLog,
        trackers: Sequence[TrackerWriter],
        signals: Signals,
        monitor: DeviceMonitor | None = None,
    ) -> None:
        self.trainer, self.log, self.trackers, self.signals = trainer, log, trackers, signals
        self.monitor, self.cluster = monitor, trainer.cluster
        self.config = trainer.config
        self.last: Path | None = None
        self.saved_step = trainer.progress.step if trainer.resumed else -1
        self.save_tried = self.saved_step

    def run(self) -> Path | None:
        """All remaining steps; returns the newest checkpoint, None if no step was ever made."""
        t = self.trainer
        self.last = t.resumed
        if t.finished:
            announce(f"already finished: {t.progress.step} of {t.total_steps} steps are done")
        with Console(t.total_steps, done_steps=t.progress.step) as console:
            try:
                self._steps(console)
            except (UserError, MachineError, OSError):
                self._rescue()
                raise
        return self.last

    def _steps(self, console: Console) -> None:
        t = self.trainer
        if t.resumed and self._due(self.config.eval.every):
            if not self.cluster.first(self._evaluated):
                self._evaluate(console)  # a signal had cut it short
        while not t.finished and not self._stopped():
            metrics = t.step()
            self._report(console, metrics)
            if metrics.non_finite_tensor and self.config.log.non_finite == "stop":
                self._stop_at(metrics)
            if self._went_back(console, metrics):
                continue
            if self._due(self.config.eval.every):
                self._evaluate(console)
            if self._due(self.config.checkpoint.every):
                self._save()
        if t.progress.step and self.saved_step != t.progress.step:
            self._save()

    def _stopped(self) -> bool:
        """Whether a signal came, to this process or another one."""
        found = [n for n in self.cluster.gather(self.signals.received) if n is not None]
        self.signals.received = self.signals.received or next(iter(found), None)
        return bool(found)

    def _evaluated(self) -> bool:
        """Whether the log has an evaluation of the step that the run was resumed at."""
        step = self.trainer.progress.step
        return any(r["log"] == "eval" and r["step"] == step for r in read_log(self.log.path))

    def _rescue(self) -> None:
        """Before an error ends the run: keep the steps made since the newest checkpoint.

        That takes all machines, and perhaps it is one of them that has failed.
        """
        if self.cluster.several or self.trainer.progress.step in (0, self.save_tried):
            return
        try:
            self._save()
        except (MachineError, OSError):
            pass  # the error that is on its way says more
        announce(f"checkpoint: {self.last}")

    def _due(self, every: int) -> bool:
        """Whether something is due after this step: at multiples of `every`, and after the last."""
        step = self.trainer.progress.step
        return self.trainer.finished or bool(every and step % every == 0)

    def _report(self, console: Console, metrics: StepMetrics) -> None:
        console.step(metrics)
        if metrics.step % self.config.log.every == 0 or metrics.skipped or self.trainer.finished:
            self.log.step(metrics)
            values = {
                "loss": metrics.loss,
                "grad_norm": metrics.grad_norm,
                "learning_rate": metrics.learning_rate,
                "tokens_per_second": metrics.tokens_per_second,
            }
            self._track(metrics.step, values)
        if self.trainer.health is not None:
            self._report_health(console, self.trainer.health)
        if self.monitor is not None:
            for found in self.monitor.collect():
                self.log.device(found)
            if self._due(self.config.log.device_every):
                self.monitor.request(metrics.step)

    def _report_health(self, console: Console, health: HealthMetrics) -> None:
        console.health(health)
        self.log.health(health)
        if health.tensors:
            values = {
                "fp8_underflowed_max": max(t.underflowed for t in health.tensors),
                "fp8_saturated_max": max(t.saturated for t in health.tensors),
            }
            self._track(health.step, values)

    def _evaluate(self, console: Console) -> None:
        self.trainer.engine.refresh_weights()
        if not self.cluster.leads:
            return
        metrics = self.trainer.evaluate(stop=lambda: self.signals.received is not None)
        if metrics is not None:
            console.evaluation(metrics)
            self.log.evaluation(metrics)
            self._track(metrics.step, {"validation_loss": metrics.loss})

    def _track(self, step: int, values: dict[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(step, values)

    def _save(self) -> None:
        start = time.perf_counter()
        self.save_tried = self.trainer.progress.step
        self.last = self.trainer.save()
        self.saved_step = self.trainer.progress.step
        self.log.checkpoint(self.saved_step, self.last, time.perf_counter() - start)

    def _went_back(self, console: Console, metrics: StepMetrics) -> bool:
        """Lets the policies of bad steps act; a state that a bad step made is never saved."""

        def say(line: str) -> None:
            console.line(line)
            self.log.info(line)

        tried, self.save_tried = self.save_tried, self.trainer.progress.step
        if Policy(self.trainer, say).after(metrics):
            self.saved_step = self.save_tried = self.trainer.progress.step or -1
            return True
        self.save_tried = tried
        return False

    def _stop_at(self, metrics: StepMetrics) -> None:
        """Nothing was updated: the state before the step is saved, so that it can be run again."""
        self.trainer.undo_advance()
        if self.trainer.progress.step and self.saved_step != self.trainer.progress.step:
            self._save()
        place = f"; the state before it is in {self.last}" if self.last else ""
        raise MachineError(
            f"step {metrics.step}: the gradient of {metrics.non_finite_tensor} is not finite"
            f"{place}; llmq-nb replay names its first bad tensor; lower optimizer.learning_rate, or"
            " set log.non_finite to skip or rollback"
        )


def leave(trainer: Trainer, checkpoint: Path | None) -> None:
    """At the end of a complete run: export, picture, sample, and where everything is."""
    from llmq_nb.report.plot import plot_runs  # matplotlib takes a third of the start-up time

    out = trainer.out_dir
    if not trainer.cluster.leads:
        trainer.export(out / "export")
        return
    if trainer.config.log.sample is not None:
        announce(f"sample, from {trainer.config.log.sample!r}:")
        print(sample(trainer, trainer.config.log.sample), flush=True)
    announce(f"checkpoint: {checkpoint}")
    announce(f"export (Hugging Face): {trainer.export(out / 'export')}")
    plot_runs([out], out / "loss.png")
    announce(f"log and picture: {out / 'log.jsonl'}, {out / 'loss.png'}")
    if trainer.device.hint is not None:
        announce(trainer.device.hint)


def sample(trainer: Trainer, prompt: str) -> str:
    """The prompt and its continuation by the trained model."""
    tokenizer = trainer.data.tokenizer
    tokens = tokenizer.encode(prompt)
    if len(tokens) == 0:
        raise UserError("empty sample", where="log.sample", mend="give a prompt, or leave it out")
    weights = shared_weights(trainer.engine)
    sampling = Sampling(SAMPLE_TEMPERATURE, 0.95, trainer.config.run.seed)
    with Generator(
        trainer.model,
        rows=1,
        length=trainer.config.batch.seq_len,
        prompt=len(tokens),
        base=trainer.config,
        weights=weights,
        arrays=weight_arrays(trainer.engine) if weights is None else None,
        kind=trainer.engine.kind,
    ) as generator:
        new = [token for _, token in generator.generate([tokens], SAMPLE_TOKENS, sampling)]
    return tokenizer.decode([*map(int, tokens), *new])
