"""Attention's tile shapes by measurement: the names under which choices are kept, and the timing of
candidates.

A choice is a number in `attention_launch.candidates`; without one a run takes `default_tiles`. It
is kept for the machine and with a run, beside the products' (matmul.py): another shape sums in
another order.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from llmq_nb.core.device import create_event, elapsed_seconds, record_event
from llmq_nb.kernels import attention_backward, elementwise
from llmq_nb.kernels.attention import attention_launch, attention_scratch_bytes
from llmq_nb.kernels.attention_hopper_tiles import Wgmma
from llmq_nb.kernels.attention_launch import (
    Tiles,
    candidates,
    default_tiles,
    launch_dkdv,
    launch_dq,
    launch_forward,
)
from llmq_nb.kernels.attention_tiles import AttentionShape, Problem, Tile

KERNELS = ("forward", "dkdv", "dq")
TIMINGS, LAUNCHES = 3, 4


def default_numbers(
    shape: AttentionShape, cc: tuple[int, int], multiprocessors: int
) -> dict[str, int]:
    """Of `default_tiles`, by kernel."""
    tiles = default_tiles(shape, cc, multiprocessors)
    return {
        kernel: next(i for i, tile in shapes.items() if tile == getattr(tiles, kernel))
        for kernel, shapes in candidates(shape.D, cc).items()
    }


def chosen_tiles(
    choices: MutableMapping[str, int],
    shape: AttentionShape,
    cc: tuple[int, int],
    multiprocessors: int,
) -> Tiles:
    """The tiles of a run. What has no choice yet, or one that this version does not know, gets the
    default, and that is written into `choices`: the run keeps what it started with."""
    numbers, tiles = default_numbers(shape, cc, multiprocessors), {}
    for kernel, shapes in candidates(shape.D, cc).items():
        name = shape.name(kernel)
        if choices.get(name) not in shapes:
            choices[name] = numbers[kernel]
        tiles[kernel] = shapes[choices[name]]
    return Tiles(**tiles)


def is_attention(name: str) -> bool:
    """Whether a choice is one of these, by its name."""
    return name.startswith("attention ")


class AttentionTimer:
    """Buffers of one shape in `memory` (timing_bytes of it, overwritten), and timed launches."""

    def __init__(self, shape: AttentionShape, cc: tuple[int, int], memory: int, stream: Any):
        self.shape, self.stream = shape, stream
        self.tiles = default_tiles(shape, cc)
        sizes = _sizes(shape)
        starts = [memory + sum(sizes[:i]) for i in range(len(sizes))]
        self.qkv, self.dout, self.dqkv, self.out, self.lse, self.stats = starts
        random = (sizes[0] + sizes[1]) // 32 * 16
        elementwise.fill_normal_launch(
            memory, n=random, seed=0, tensor=0, std=1.0, dtype="bf16", stream=stream
        )
        B, T, H, G, D = shape.B, shape.T, shape.H, shape.G, shape.D
        attention_launch(
            self.out, self.lse, self.qkv, 0, B=B, T=T, H=H, G=G, D=D, tiles=self.tiles,
            stream=stream,
        )  # fmt: skip
        attention_backward.statistics_launch(
            self.stats, self.out, self.dout, self.lse, B=B, T=T, H=H, D=D, stream=stream
        )

    def seconds(self, kernel: str, shapes: list[Tile | Wgmma]) -> list[float]:
        """Of one launch with each shape."""
        s = self.shape
        row = 2 * s.D
        stride = (s.H + 2 * s.G) * row
        p = Problem(s.B, s.T, s.H, s.G, s.D, stride, stride, 0)
        q, k, v = (self.qkv + n * row for n in (0, s.H, s.H + s.G))
        dq, dk, dv = (self.dqkv + n * row for n in (0, s.H, s.H + s.G))
        inputs = self.stats, self.dout, (q, k, v), p
        launches: Mapping[str, Callable[[Any], None]] = {
            "forward": lambda shape: launch_forward(
                self.out, self.lse, q, k, v, p, replace(self.tiles, forward=shape), self.stream
            ),
            "dkdv": lambda shape: launch_dkdv(dk, dv, stride, *inputs, shape, self.stream),
            "dq": lambda shape: launch_dq(dq, stride, *inputs, shape, self.stream),
        }
        return [self._time(lambda shape=shape: launches[kernel](shape)) for shape in shapes]

    def _time(self, launch: Callable[[], None]) -> float:
        """Best of a few timings of some launches in a row, a launch [s]."""
        launch()  # loads the kernel
        seconds = []
        for _ in range(TIMINGS):
            start, end = create_event(timing=True), create_event(timing=True)
            record_event(start, self.stream)
            for _ in range(LAUNCHES):
                launch()
            record_event(end, self.stream)
            seconds.append(elapsed_seconds(start, end) / LAUNCHES)
        return min(seconds)


def _sizes(s: AttentionShape) -> list[int]:
    """Bytes of qkv, dout, dqkv, out, lse and the statistics, each a multiple of 256."""
    rows = s.B * s.T
    packed, heads = rows * (s.H + 2 * s.G) * s.D * 2, rows * s.H * s.D * 2
    sizes = [packed, heads, packed, heads, rows * s.H * 4, attention_scratch_bytes(s.B, s.T, s.H)]
    return [-(-size // 256) * 256 for size in sizes]


def timing_bytes(shape: AttentionShape) -> int:
    """Memory that an AttentionTimer takes."""
    return sum(_sizes(shape))
