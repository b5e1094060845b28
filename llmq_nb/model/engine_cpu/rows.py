"""Rows in parallel: NumPy releases the interpreter lock, so slices of rows run on all cores.

Slices have a fixed number of rows whatever the number of cores, and partial sums are added in slice
order, so the bits depend on neither. A slice is small enough that its float32 copies stay in the
cache.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.rounding import to_float32

SLICE_ELEMENTS = 1 << 16
"""Elements of the widest operand in a slice: 256 KiB as float32."""
Result = TypeVar("Result")


@cache
def pool() -> ThreadPoolExecutor:
    """The engine's threads: as many as this process may use cores."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="cpu-engine")


def each(work: Callable[[int], Result], count: int) -> list[Result]:
    """work(0), ..., work(count - 1) on the threads; the results in order."""
    if count == 1:
        return [work(0)]
    return list(pool().map(work, range(count)))


def each_rows(work: Callable[[slice], Result], rows: int, width: int) -> list[Result]:
    """`work` on slices of rows of `width` elements; the results in order."""
    step = max(1, SLICE_ELEMENTS // max(width, 1))
    count = max(1, -(-rows // step))
    return each(lambda i: work(slice(i * step, min((i + 1) * step, rows))), count)


def accumulated(out: NDArray[Any], value: NDArray[np.float32], accumulate: bool) -> None:
    """out (+)= value, added in float32 and rounded once to out's format."""
    out[...] = to_float32(out) + value if accumulate else value
