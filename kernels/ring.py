"""Pieces of 8 values on their way from memory to a thread through shared memory.

A thread reads back only what it copied itself, so the ring needs no barrier; and what is under way
takes no registers, so a few warps keep a whole multiprocessor's share of the bandwidth busy.

    r = ring(dtype, stages)
    copy, take, wait = r.copy, r.take, r.wait

    copy(slot, address, inside)     start a piece on its way to a shared address (zeros where not
                                    inside: nothing is read)
    cp_commit()                     close a stage, also an empty one
    wait()                          until the oldest of `stages` stages is there
    take(tile, i, slot)             tile[i] = the piece (tiles: vector.py)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from llmq_nb.kernels.ptx import cp16z, cp_wait0, cp_wait1, cp_wait2, cp_wait3, lds128
from llmq_nb.kernels.vector import vector

WAITS = (cp_wait0, cp_wait1, cp_wait2, cp_wait3)
WHOLE, NOTHING = np.uint32(16), np.uint32(0)


@dataclass(frozen=True, slots=True)
class Ring:
    """Device functions for one storage format and number of stages, as the module docstring lists
    them."""

    copy: Callable[..., Any]
    take: Callable[..., Any]
    wait: Callable[..., Any]


@cache
def ring(dtype: str, stages: int) -> Ring:
    """The device functions; stages: 1 to 4."""
    WORDS = vector(dtype).words

    @cuda.jit(device=True)
    def copy(slot, address, inside):
        size = WHOLE if inside else NOTHING
        for w in range(0, WORDS * 4, 16):
            cp16z(slot + w, address + w, size)

    @cuda.jit(device=True)
    def take(tile, i, slot):
        for w in range(0, WORDS, 4):
            a, b, c, d = lds128(slot + w * 4)
            tile[i, w], tile[i, w + 1], tile[i, w + 2], tile[i, w + 3] = a, b, c, d

    return Ring(copy, take, WAITS[stages - 1])
