"""Progress for people: a bar on a terminal, plain lines everywhere else (files, pipes, CI)."""

import math
import sys
import time
from typing import Self, TextIO

import rich.console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from llmq_nb.report.metrics import EvalMetrics, HealthMetrics, StepMetrics, TensorHealth

LINES = 100
"""About how many plain lines the steps of a run make, if they are fast."""
LINE_SECONDS = 5.0
"""A plain line comes after this time at the latest (with the next step)."""
MEMORY = 0.9
"""Weight of the past in the mean time of a step that the ETA is made from."""


def announce(text: str) -> None:
    """A fact of one line, before or after a run: which device and why, where the files are."""
    print(" ".join(text.split()), flush=True)


class Console:
    """Shows the steps of one run; a context manager.

    plain: True for lines, False for a bar, None: a bar where stdout is a terminal. done_steps: made
    before a resume. every: steps between two plain lines; None: about 100 lines a run.
    """

    def __init__(
        self,
        total_steps: int,
        plain: bool | None = None,
        *,
        done_steps: int = 0,
        every: int | None = None,
        file: TextIO | None = None,
    ) -> None:
        self.total_steps, self._file = total_steps, file or sys.stdout
        self.plain = not self._file.isatty() if plain is None else plain
        self._every = every or -(-total_steps // LINES)
        self._first, self._last_step, self._last_time = done_steps + 1, done_steps, time.monotonic()
        self._step_seconds: float | None = None
        self._validation = ""
        self._progress = self._task = None
        if not self.plain:
            # no markup: a path may hold brackets
            screen = rich.console.Console(
                file=self._file, markup=False, emoji=False, highlight=False, force_terminal=True
            )
            self._progress = Progress(
                TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[facts]}", markup=False),
                TextColumn("ETA", markup=False),
                TimeRemainingColumn(compact=True),
                console=screen,
                speed_estimate_period=120,
            )
            self._task = self._progress.add_task(
                "", total=total_steps, completed=done_steps, facts=""
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, m: StepMetrics) -> None:
        """One step is done. A skipped update is always said in a line of its own."""
        if m.skipped:
            self.line(f"step {m.step}: no update, {_reason(m)}")
        past = self._step_seconds
        new = m.seconds
        self._step_seconds = new if past is None else MEMORY * past + (1 - MEMORY) * new
        facts = f"loss {m.loss:.4f}{self._validation}"
        speed = f"{m.tokens_per_second:,.0f} tokens/s"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=m.step, facts=f"{facts}  {speed}")
        elif self._is_due(m.step):
            eta = _clock((self.total_steps - m.step) * self._step_seconds)
            self.line(
                f"step {m.step}/{self.total_steps}  {facts}  norm {m.grad_norm:.3g}"
                f"  lr {m.learning_rate:.2e}  {speed}  ETA {eta}"
            )
            self._last_step, self._last_time = m.step, time.monotonic()

    def health(self, m: HealthMetrics) -> None:
        """The worst tensors of a step's FP8 products; nothing to say without such products."""
        if m.tensors:
            self.line(f"step {m.step}: FP8 {worst(m)}, largest lse {m.lse_max:.4g}")

    def evaluation(self, m: EvalMetrics) -> None:
        """An evaluation is done; its loss stays beside the training loss."""
        self._validation = f"  val loss {m.loss:.4f}"
        tokens = f"{m.tokens:,} tokens, {m.seconds:.1f} s"
        self.line(f"step {m.step}: validation loss {m.loss:.4f} ({tokens})")

    def line(self, text: str) -> None:
        """A line of text above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, soft_wrap=True)
            return
        try:
            print(text, file=self._file, flush=True)
        except OSError:  # a reader that is gone or a full disk must not end the training
            pass

    def _is_due(self, step: int) -> bool:
        waited = time.monotonic() - self._last_time >= LINE_SECONDS
        enough = step - self._last_step >= self._every
        return waited or enough or step in (self._first, self.total_steps)


def worst(m: HealthMetrics) -> str:
    """The tensors that lose most at either end of their format, or one that is not finite."""
    for t in m.tensors:
        if not math.isfinite(t.absmax):
            return f"absmax {t.absmax} ({_place(t)})"
    low = max(m.tensors, key=lambda t: t.underflowed)
    high = max(m.tensors, key=lambda t: t.saturated)
    return (
        f"underflowed at most {low.underflowed:.2%} ({_place(low)}),"
        f" saturated {high.saturated:.2%} ({_place(high)})"
    )


def _place(t: TensorHealth) -> str:
    return f"{t.name}, layer {t.layer}, {t.format}"


def _reason(m: StepMetrics) -> str:
    if m.non_finite_tensor is not None:
        return f"the gradient of {m.non_finite_tensor} is not finite"
    if m.spike:
        return f"the loss had jumped to {m.loss:.4g}"
    return "no supervised token" if m.supervised == 0 else "the gradient norm is not finite"


def _clock(seconds: float) -> str:
    """h:mm:ss, with days where there are any."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours}:{minutes:02}:{s:02}" if days else f"{hours}:{minutes:02}:{s:02}"
