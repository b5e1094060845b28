"""What a bad step does to a run: `[log] non_finite` and `[log] spike`.

A gradient that is not finite never changes the weights (the optimizer's step sees to that on the
device). A jump of the loss, a *spike*, is known when its update is made, so whatever undoes it goes
back to the newest checkpoint, or to the start where there is none:

    stop      ends the run; the newest state without the bad step is in a checkpoint
    skip      not finite: the run goes on. Spike: the steps since the checkpoint are made again, the
              same bits, and the bad one without its update
    rollback  from the checkpoint on, with the data that come after the bad step's

All of it depends on the checkpoint and the config alone: a run that is resumed before its next
checkpoint meets the same bad step and does the same. Which steps are left out, how often the run
went back and the losses that a spike is measured by are in the checkpoint.
"""

import statistics
from collections.abc import Callable

from llmq_nb.config import LogConfig
from llmq_nb.core.errors import MachineError
from llmq_nb.report.metrics import StepMetrics
from llmq_nb.train.trainer import Trainer


class Policy:
    """Acts on one trainer's bad steps. say: takes a line about what was done."""

    def __init__(self, trainer: Trainer, say: Callable[[str], None]) -> None:
        self.trainer, self.say = trainer, say
        self.log: LogConfig = trainer.config.log

    def after(self, m: StepMetrics) -> bool:
        """After a step; true: the run went back, and this step is still to be made.

        Raises MachineError where a spike, or going back once too often, ends the run.
        """
        if m.non_finite_tensor is not None and self.log.non_finite == "rollback":
            self._back(m, f"the gradient of {m.non_finite_tensor} is not finite", again=False)
            return True
        if not m.spike or m.skipped or self.log.spike == "off":
            return False
        jump = f"the loss jumped to {m.loss:.4g} from {_median(self.trainer):.4g}"
        if self.log.spike == "stop":
            newest = self.trainer.newest_checkpoint(m.step - 1)
            place = f"the state before it is in {newest}" if newest else "no checkpoint is older"
            raise MachineError(
                f"step {m.step}: {jump}; {place}; lower optimizer.learning_rate, or set log.spike"
                " to skip or rollback"
            )
        self._back(m, jump, again=self.log.spike == "skip")
        return True

    def _back(self, m: StepMetrics, why: str, *, again: bool) -> None:
        t = self.trainer
        if t.progress.rollbacks >= self.log.rollbacks:
            newest = t.newest_checkpoint(m.step - 1)
            raise MachineError(
                f"step {m.step}: {why}, and the run went back {t.progress.rollbacks} times already"
                f" (log.rollbacks); newest checkpoint: {newest}; lower optimizer.learning_rate"
            )
        t.go_back(m.step, leave_out=m.loss if again else None)
        then = "the same steps follow without that one" if again else "other data follow"
        self.say(f"step {m.step}: {why}; back to step {t.progress.step}, {then}")


def _median(trainer: Trainer) -> float:
    return statistics.median(trainer.progress.recent)
