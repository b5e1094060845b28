"""The products of a rank, and the choice among each one's candidates by timing.

A large product draws so much power that the GPU lowers its clock within about a tenth of a second,
by how much depends on the candidate: what is fastest in a short run need not be fastest in training
(H200, a weight gradient of Qwen2.5-1.5B, us: 2436 and 2537 in a short run, 2709 and 2618 in a long
one). So candidates near the best of a short run are timed again once the clock has settled. Small
products do not draw that much: a short run decides.

A choice is kept for the machine and with the run (train/tuning.py), so the bits stay.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from llmq_nb.core.device import create_event, elapsed_seconds, record_event
from llmq_nb.kernels.launch import is_preparing
from llmq_nb.kernels.matmul import Product, Shape
from llmq_nb.kernels.matmul_swiglu import FusedProduct
from llmq_nb.kernels.matmul_swiglu_backward import FusedGradient

TIMINGS = 4
"""Short runs of a candidate."""
WORTHWHILE = 0.99
"""Share of the first candidate's time below which another one is taken."""
LARGE = 150e-6
"""Time of a product from which its candidates are timed at length [s]."""
NEAR, FINALISTS = 1.12, 6
"""Times the best short run, and at most so many: the candidates of the long runs, and the first."""
SETTLE, MEASURE = 0.12, 0.1
"""Of a long run: until the clock has settled, and what is timed then [s]."""


def best_of(seconds: list[float]) -> int:
    """The fastest, if it is clearly faster than the first."""
    best = int(np.argmin(seconds))
    return best if seconds[best] < WORTHWHILE * seconds[0] else 0


class Products:
    """The products of one rank: a plan a shape, made on first use.

    choices: index of the algorithm by shape's name, from a tuning file; shapes that are not in it
    take the first candidate.
    """

    def __init__(self, *, device: int, workspace: int, choices: dict[str, int] | None = None):
        self.device, self.workspace = device, workspace
        self.choices = dict(choices or {})
        self._plans: dict[Shape, Any] = {}

    def plan(self, shape: Shape) -> Any:
        """The plan of a shape: a Product, or of a swiglu shape a FusedProduct or FusedGradient."""
        found = self._plans.get(shape)
        if found is None:
            algorithm = self.choices.get(str(shape), 0)
            if shape.swiglu:
                plain = self.plan(dataclasses.replace(shape, swiglu=False))
                fused = FusedProduct if shape.kind == "forward" else FusedGradient
                found = fused(shape, plain, algorithm=algorithm)
            else:
                found = Product(shape, device=self.device, algorithm=algorithm)
            self._plans[shape] = found
        return found

    @property
    def shapes(self) -> list[Shape]:
        """The shapes in use."""
        return list(self._plans)

    def timing_order(self) -> list[Shape]:
        """The shapes in use, as they must be timed in one memory: results lie behind the operands,
        so what a smaller product reads was never written; a product before it with SwiGLU, of
        which it is a part."""
        return sorted(self._plans, key=lambda s: (-s.timing_room, s.swiglu))

    def __call__(
        self, shape: Shape, out: int, x: int, y: int, *, stream: int, bias: int = 0,
        scales: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Launch a product (see `Product.__call__`); only plan it while launches are prepared."""
        plan = self.plan(shape)
        if not is_preparing():
            plan(out, x, y, workspace=self.workspace, stream=stream, bias=bias, scales=scales)

    def with_swiglu(
        self, shape: Shape, act: int, gate_up: int, x: int, weight: int, *, stream: int,
        absmax: int = 0, scales: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Launch a swiglu shape; act: 0 if only gate_up is wanted. absmax: of act, or 0."""
        self.plan(shape)(
            gate_up, x, weight, act=act, absmax=absmax, workspace=self.workspace, stream=stream,
            scales=scales,
        )  # fmt: skip

    def with_swiglu_backward(
        self, shape: Shape, dgate_up: int, dact: int, dy: int, weight: int, gate_up: int, *,
        stream: int, absmax: int = 0, scales: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Launch the swiglu shape of a data gradient; dact: room for it."""
        self.plan(shape)(
            dgate_up, dy, weight, gate_up=gate_up, dact=dact, absmax=absmax,
            workspace=self.workspace, stream=stream, scales=scales,
        )  # fmt: skip

    def tune(
        self, memory: int, nbytes: int, *, stream: int, progress: Callable[[str], None]
    ) -> dict[str, int]:
        """Time the candidates of every shape in use that has no choice yet, and choose. Returns
        these choices.

        memory: where operands and results may lie (overwritten), nbytes of values that are finite
        in every format. A shape that needs more keeps the first candidate for now. progress: takes
        a line once large ones are to be timed.
        """
        made = {}
        for shape in self.timing_order():
            plan = self._plans[shape]
            if str(shape) in self.choices or shape.timing_bytes > nbytes:
                continue
            chosen = best_of(self.times(plan, memory, stream=stream, progress=progress))
            plan.choose(chosen)
            self.choices[str(shape)] = made[str(shape)] = chosen
        return made

    def take(self, choices: dict[str, int]) -> None:
        """Use what another rank has chosen."""
        if choices is self.choices:
            return
        self.choices.update(choices)
        for shape, plan in self._plans.items():
            plan.choose(self.choices.get(str(shape), 0))

    def times(
        self, plan: Any, memory: int, *, stream: int,
        progress: Callable[[str], None] = lambda _: None,
    ) -> list[float]:  # fmt: skip
        """Seconds of a launch with each candidate, in their order; infinite for those that short
        runs ruled out. memory, progress as in `tune`."""
        launch = self._launch_of(plan, memory, stream)
        short = []
        for candidate in range(plan.count):
            plan.choose(candidate)
            short.append(min(_seconds(launch, 2, stream) for _ in range(TIMINGS)))
        best = min(short)
        if best < LARGE:
            return short
        progress(f"timing {plan.shape}")
        by_speed = sorted(range(plan.count), key=short.__getitem__)
        finalists = [c for c in by_speed if short[c] < NEAR * best][:FINALISTS]
        seconds = [math.inf] * plan.count
        for candidate in dict.fromkeys([*finalists, 0]):
            plan.choose(candidate)
            _seconds(launch, math.ceil(SETTLE / short[candidate]), stream)
            seconds[candidate] = _seconds(launch, math.ceil(MEASURE / short[candidate]), stream)
        return seconds

    def _launch_of(self, plan: Any, memory: int, stream: int) -> Callable[[], None]:
        """Launch a plan with operands and results in memory, as they lie for timing."""
        shape, room = plan.shape, plan.shape.timing_room
        extra: dict[str, Any] = {"bias": memory} if shape.bias else {}
        out = memory + 2 * room
        if shape.swiglu and shape.kind == "forward":
            extra = {"act": memory + 3 * room}
        elif shape.swiglu:  # gate and up may be what larger products left there: finite as well
            out = memory + 4 * room
            extra = {"gate_up": memory + 2 * room, "dact": memory + 6 * room}
        if shape.swiglu and shape.quantised:
            extra["absmax"] = out
        if shape.quantised:
            extra["scales"] = (memory, memory)[: 1 if shape.codes else 2]
        addresses = out, memory, memory + room
        return lambda: plan(*addresses, workspace=self.workspace, stream=stream, **extra)


def _seconds(launch: Callable[[], None], count: int, stream: int) -> float:
    """Of a launch, among count in a row."""
    start, end = create_event(timing=True), create_event(timing=True)
    record_event(start, stream)
    for _ in range(count):
        launch()
    record_event(end, stream)
    return elapsed_seconds(start, end) / count
