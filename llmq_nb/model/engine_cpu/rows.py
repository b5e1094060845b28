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
from threadpoolctl import threadpool_limits

from llmq_nb.core.rounding import to_float32

SLICE_ELEMENTS = 1 << 16
"""Elements of the widest operand in a slice: 256 KiB as float32."""
PRODUCT_ROWS = 256
"""Rows of a product's slice."""
Result = TypeVar("Result")


@cache
def pool() -> ThreadPoolExecutor:
    """The engine's threads: as many as this process may use cores. Holds BLAS to one thread."""
    threadpool_limits(limits=1, user_api="blas")
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="cpu-engine")


def each(work: Callable[[int], Result], count: int) -> list[Result]:
    """work(0), ..., work(count - 1) on the threads; the results in order."""
    threads = pool()  # also where one piece runs here: BLAS must have one thread from the start
    return [work(0)] if count == 1 else list(threads.map(work, range(count)))


def each_rows(work: Callable[[slice], Result], rows: int, width: int) -> list[Result]:
    """`work` on slices of rows of `width` elements; the results in order."""
    step = max(1, SLICE_ELEMENTS // max(width, 1))
    count = max(1, -(-rows // step))
    return each(lambda i: work(slice(i * step, min((i + 1) * step, rows))), count)


def product(
    out: NDArray[Any],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    *,
    scale: np.float32,
    bias: NDArray[np.float32] | None = None,
    accumulate: bool = False,
) -> None:
    """out (+)= scale a b + bias, in float32 and rounded once. Each row is summed by one thread."""
    rows = a.shape[0]

    def work(i: int) -> None:
        part = slice(i * PRODUCT_ROWS, min((i + 1) * PRODUCT_ROWS, rows))
        value = a[part] @ b
        if scale != 1:
            value *= scale
        if bias is not None:
            value += bias
        accumulated(out[part], value, accumulate)

    each(work, -(-rows // PRODUCT_ROWS))


def accumulated(out: NDArray[Any], value: NDArray[np.float32], accumulate: bool) -> None:
    """out (+)= value, added in float32 and rounded once to out's format."""
    out[...] = to_float32(out) + value if accumulate else value
