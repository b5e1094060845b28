"""A training run as an object: one step at a time, evaluation, checkpoints, export.

    from llmq_nb import Trainer, load_config
    trainer = Trainer(load_config("configs/quickstart.toml"))
    metrics = trainer.step()

`llmq_nb.train.run` is the whole run around it, with logs, signals and the progress display.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmq_nb.comm.cluster import Cluster
from llmq_nb.config import Config
from llmq_nb.core.device import DeviceError
from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.data.loader import StepBatch, eval_batches
from llmq_nb.data.packing import Packing
from llmq_nb.data.tokenizer import export_source
from llmq_nb.io.export import DEFAULT_SHARD_SIZE, export_model
from llmq_nb.io.weights import check_weights, load_weights
from llmq_nb.report.console import announce as print_line
from llmq_nb.report.metrics import EvalMetrics, HealthMetrics, StepMetrics
from llmq_nb.train import setup, snapshot
from llmq_nb.train.checkpoint import (
    Checkpoint,
    check_checkpoint_space,
    check_out_dir,
    checkpoint_bytes,
    latest_checkpoint,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from llmq_nb.train.engine import Engine, make_engine
from llmq_nb.train.gradients import loss_and_gradients
from llmq_nb.train.health import is_due
from llmq_nb.train.initial import set_random_weights, set_weights
from llmq_nb.train.memory_policy import resolve_memory
from llmq_nb.train.schedule import check_schedule, learning_rate
from llmq_nb.train.spikes import is_spike, remember
from llmq_nb.train.together import Reader, together

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, below `run.out_dir`."""


class Trainer:
    """One run. Raises UserError for whatever is wrong with the config, the files or the data.

    resume: "auto" goes on from the newest complete checkpoint in the run's folder, if any; "none"
    starts anew and refuses a folder with checkpoints, "start" does not (for runs that save
    nothing); a path is the checkpoint to go on from, or a run's folder, of which it is the newest.
    announce: takes the one-line facts of the start. cluster: the processes of several machines, of
    which each has a Trainer and makes the same calls; None: this one is alone.

    `config` is the resolved one: what `memory.policy = "auto"` chose stands in it.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: str | Literal["auto", "none", "start"] = "auto",
        announce: Callable[[str], None] = print_line,
        cluster: Cluster | None = None,
    ) -> None:
        self.cluster = cluster = cluster or Cluster()
        found = setup.choose_device(config)
        if config.schedule.steps is not None:
            check_schedule(config.schedule, config.schedule.steps)
        self.source = setup.resolve_model(config, announce)
        self.model = self.source.model
        self.device = setup.settle_device(config, found, self.model)
        config = setup.settle_ranks(config, self.device, cluster)
        setup.check_supported(config, found)
        announce(self.device.reason)
        if cluster.several:
            each = f"{config.ranks_each} rank{'s' * (config.ranks_each > 1)} each"
            announce(f"machines: {', '.join(cluster.gather(cluster.name))}; {each}")
        if self.device.hint is not None:
            announce(self.device.hint)
        if self.source.pretrained:
            assert self.source.folder is not None
            check_weights(self.source.folder, self.model)
        self.out_dir = Path(config.out_dir)
        if cluster.leads:
            setup.check_writable(self.out_dir)
        self.resumed = cluster.first(lambda: self._find_checkpoint(resume))
        checkpoint = None
        if self.resumed is not None:
            checkpoint = snapshot.open_checkpoint(self.resumed, self.model)
        self.resumed_step = 0 if checkpoint is None else checkpoint.step
        self.config = config = cluster.first(
            lambda: resolve_memory(
                config,
                self.model,
                self.device.kind,
                checkpoint,
                announce,
                batch_bytes=setup.batch_bytes(config),
            )
        )
        if self.device.kind == "cpu":
            setup.check_memory(config, self.model)
        self.data = setup.open_data(config, self.source, announce, cluster)
        if checkpoint is not None:
            snapshot.check_same_windows(checkpoint, config, self.data.train)
        windows = len(Packing(self.data.train, config.batch.seq_len, config.data.packing))
        self.total_steps = setup.total_steps(config, windows)
        check_schedule(config.schedule, self.total_steps)
        setup.check_same_files(cluster, self.source, f"{len(self.data.train)} tokens", windows)
        tuning = None if checkpoint is None else checkpoint.state.get("tuning")
        self.engine: Engine = make_engine(self.device.kind, config, self.model, tuning, cluster)
        if cluster.leads:
            check_checkpoint_space(self.checkpoints, self._checkpoint_room())
        self.progress = self._start(checkpoint, announce)
        self._before = self.progress
        self.health: HealthMetrics | None = None
        """Of the last step, where `log.health_every` asks for it."""
        self.loader = setup.open_loader(config, self.data.train, self.progress.position)
        self._waiting: StepBatch | None = self.loader.next_step()  # shows a damaged store now

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.out_dir / CHECKPOINTS

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.progress.step >= self.total_steps

    def step(self) -> StepMetrics:
        """One optimizer step. A gradient that is not finite changes nothing but the metrics."""
        start, self.health = time.perf_counter(), None
        batch, self._waiting = self._waiting or self.loader.next_step(), None
        index = self.progress.step
        rate = learning_rate(
            self.config.schedule, self.config.optimizer.learning_rate, index, self.total_steps
        )
        due = is_due(self.config, index + 1, self.total_steps)
        left_out = dict(self.progress.left_out).get(index + 1)
        if batch.supervised and left_out is None:
            try:
                result = self.engine.train_step(
                    batch,
                    step=index,
                    updates=self.progress.updates,
                    learning_rate=rate,
                    health=due,
                )
            except DeviceError as error:  # it names the kernel or copy; the step is known here
                raise DeviceError(error.code, f"step {index + 1}, {error}") from error
            facts: dict[str, Any] = {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lse_max": result.lse_max,
                "skipped": not result.finite,
                "non_finite_tensor": result.non_finite_tensor,
                "spike": result.finite and self._is_spike(result.loss),
            }
            if due:
                self.health = HealthMetrics(
                    step=index + 1, lse_max=result.lse_max, tensors=result.health
                )
        else:  # nothing to learn from: no update, and the optimizer's step count stays
            facts = {"loss": math.nan, "grad_norm": 0.0, "lse_max": math.nan, "skipped": True}
            if left_out is not None:
                facts |= {"loss": left_out, "spike": True}
        self._advance(batch, facts)
        seconds = time.perf_counter() - start
        return StepMetrics(
            step=self.progress.step,
            learning_rate=rate,
            tokens=batch.tokens.size,
            supervised=batch.supervised,
            seconds=seconds,
            tokens_per_second=batch.tokens.size / seconds,
            **facts,
        )

    def evaluate(self, *, stop: Callable[[], bool] = lambda: False) -> EvalMetrics | None:
        """The mean loss on the validation store; None without one, or where `stop` became true."""
        if self.data.validation is None:
            return None
        start = time.perf_counter()
        b, limit = self.config.batch, self.config.eval.steps or None
        losses, supervised = [], 0
        batches = eval_batches(
            self.data.validation, b.micro_batch, b.seq_len, limit, packing=self.config.data.packing
        )
        for batch in batches:
            if stop():
                return None
            losses.append(self.engine.evaluate(batch.tokens, batch.targets, batch.segment_start))
            supervised += batch.supervised
        return EvalMetrics(
            step=self.progress.step,
            loss=math.fsum(losses) / supervised if supervised else math.nan,
            tokens=supervised,
            seconds=time.perf_counter() - start,
        )

    def loss_and_gradients(
        self, tokens: ArrayLike, targets: ArrayLike, mask: ArrayLike | None = None
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """The mean loss of a batch and its gradients by Hugging Face name; nothing is updated.

        tokens, targets: (B, T) integers of any B and T, target -100 = not trained. mask: (B, T),
        true where the target counts. Each row is one document.
        """
        return loss_and_gradients(self.config, self.model, self.engine, tokens, targets, mask)

    def save(self) -> Path:
        """Write a checkpoint of this moment; older ones go as `[checkpoint]` says."""
        c = self.config.checkpoint

        def write(reader: Reader) -> Path:
            return save_checkpoint(
                self.checkpoints,
                step=self.progress.step,
                parts=snapshot.parts(reader),
                state=self._state(),
                keep=c.keep,
                major_every=c.major_every,
                nbytes=self._checkpoint_bytes(),
            )

        return together(self.engine, self.cluster, write)

    def _state(self) -> dict[str, Any]:
        return snapshot.run_state(
            self.config, self.model, self.progress, self.data.train, self.engine.tuning
        )

    def export(self, out_dir: str | Path, *, max_shard_size: int = DEFAULT_SHARD_SIZE) -> Path:
        """Write the model as a folder that transformers loads, in the run's `precision.dtype`."""
        masters = {s.parameter.name: s.master for s in self.engine.states}

        def write(reader: Reader) -> Path:
            return export_model(
                out_dir,
                self.model,
                lambda parameter: reader.read(masters[parameter.name]),
                dtype=DType(self.config.precision.dtype),
                tokenizer=export_source(setup.tokenizer_path(self.config, self.source)),
                max_shard_size=max_shard_size,
            )

        return together(self.engine, self.cluster, write)

    def make_out_dir(self) -> None:
        """Make the run's folder. Raises UserError where it cannot be written."""
        check_out_dir(self.checkpoints, self._checkpoint_room())

    def close(self) -> None:
        """End the loader's thread and free the device's memory."""
        self.loader.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def undo_advance(self) -> None:
        """Count the last step as not made: for one whose update was left out."""
        self.progress = self._before

    def newest_checkpoint(self, most: int) -> Path | None:
        """The newest state of this run, of at most `most` steps; None: only the start."""
        return self.cluster.first(lambda: self._newest_checkpoint(most))

    def _newest_checkpoint(self, most: int) -> Path | None:
        found = [newest_checkpoint(self.checkpoints, most)]
        if self.resumed is not None and self.resumed_step <= most:
            found.append(self.resumed)
        paths = [path for path in found if path is not None]
        return max(paths, key=lambda path: read_checkpoint(path).step, default=None)

    def go_back(self, step: int, *, leave_out: float | None = None) -> None:
        """Take up the newest checkpoint before step `step`, or the start, and what to do from it.

        leave_out: the step's loss: the same data follow, and the step is made without its update.
        None: the data go on after those of the last step.
        """
        before, path = self.progress, self.newest_checkpoint(step - 1)
        checkpoint = None if path is None else snapshot.open_checkpoint(path, self.model)
        if checkpoint is None:
            snapshot.clear_moments(self.engine)
        progress = self._start(checkpoint, lambda _: None)
        progress.rollbacks = before.rollbacks + 1
        if leave_out is None:
            progress.position = before.position
        else:
            progress.left_out = (*before.left_out, (step, leave_out))
            self.loader.close()
            self.loader = setup.open_loader(self.config, self.data.train, progress.position)
        self.progress = self._before = progress

    def _is_spike(self, loss: float) -> bool:
        log = self.config.log
        return log.spike != "off" and is_spike(loss, self.progress.recent, log.spike_deviations)

    def _advance(self, batch: StepBatch, facts: dict[str, Any]) -> None:
        before, updated = self.progress, not facts["skipped"]
        counts = updated and not facts["spike"] and self.config.log.spike != "off"
        self._before = before
        self.progress = dataclasses.replace(
            before,
            step=before.step + 1,
            updates=before.updates + updated,
            position=batch.position,
            recent=remember(before.recent, facts["loss"]) if counts else before.recent,
        )

    def _checkpoint_room(self) -> int:
        """Free bytes that the run needs: a new checkpoint is written beside the one before."""
        every, first = self.config.checkpoint.every, self.resumed is None
        only_last = every == 0 or every >= self.total_steps
        return (1 if first and only_last else 2) * self._checkpoint_bytes()

    def _checkpoint_bytes(self) -> int:
        return checkpoint_bytes(snapshot.part_bytes(self.engine))

    def _find_checkpoint(self, resume: str) -> Path | None:
        """The checkpoint to go on from. Its hashes are compared: a changed bit would train on."""
        if resume == "auto":
            return latest_checkpoint(self.checkpoints, verify=True)
        if resume == "start":
            return None
        if resume == "none":
            if latest_checkpoint(self.checkpoints) is not None:
                raise UserError(
                    "the run has checkpoints",
                    where=str(self.checkpoints),
                    mend="--resume auto goes on; for a new run choose another run.name",
                )
            return None
        folder = Path(resume).expanduser()
        for root in (folder / CHECKPOINTS, folder):
            newest = latest_checkpoint(root, verify=True)
            if newest is not None:
                return newest
        return read_checkpoint(folder, verify=True).path

    def _start(
        self, checkpoint: Checkpoint | None, announce: Callable[[str], None]
    ) -> snapshot.Progress:
        if checkpoint is not None:
            progress = snapshot.restore(self.engine, checkpoint)
            announce(f"resumed: step {progress.step} from {checkpoint.path}")
            return progress
        if self.source.pretrained:
            assert self.source.folder is not None
            set_weights(self.engine, load_weights(self.source.folder, self.model))
        else:
            set_random_weights(self.engine, self.model)
        return snapshot.Progress()
