r"""Gradients of all ranks added up: the kernel behind the copies of a reduce-scatter.

    sum_i   = contributions[0, i] + contributions[1, i] + ...     (ranks in order, float32)
    shard_i = stochastic_round(shard_i + sum_i)
    shard_i = stochastic_round(sum_i)                             (`start`: a sum anew)

Shapes   shard: n elements, a multiple of 8 (one piece), from element `first` of a tensor on, a
         multiple of 8; contributions: RANKS rows, `stride` bytes apart, of which n elements count.
Dtypes   bfloat16 or float32 (`dtype`, of all). counter: one uint32 in device memory,
         step * grad_accumulation + micro_step. shard may lie in mapped host memory.
Errors   One float32 rounding an addition, in the written order; one stochastic rounding, with bits
         of (seed, purpose, element, tensor, counter) alone, so any cut into shards that starts at a
         multiple of 8 gives the same values (random.py). float32 is stored as it is.
Cost     Every operand once. `start` does not read the shard.
Source   Reduce-scatter: Patarasuk & Yuan 2009. Philox: random.py.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import add_rn, ldg32
from llmq_nb.kernels.random import Purpose, philox, random_bits_ref, round_stochastic_ref
from llmq_nb.kernels.vector import PIECE, vector

THREADS = 256
BATCH = 4
"""Ranks whose pieces a thread has under way at once: more would only take registers."""
GRADIENT = int(Purpose.GRADIENT)
NOTHING = np.float32(-0.0)  # x + -0.0 is x, also where x is -0.0
SIGNATURE = (
    *(types.uint64,) * 3, types.int64, types.int64, types.int64, types.uint32, types.uint32
)  # fmt: skip


def make_accumulate(ranks: int, dtype: str, start: bool):
    """A thread a piece; BATCH ranks at a time."""
    v = vector(dtype)
    WORDS, BYTES, load, load_cs, store = v.words, v.bytes * PIECE, v.load, v.load_cs, v.store
    low, high, set_pair_stochastic = v.low, v.high, v.set_pair_stochastic
    BATCHED, REST, START = ranks // BATCH * BATCH, ranks % BATCH, start

    @cuda.jit(device=True)
    def add(total, tile, u):
        for j in range(4):
            total[2 * j] = add_rn(total[2 * j], low(tile, u, j))
            total[2 * j + 1] = add_rn(total[2 * j + 1], high(tile, u, j))

    def accumulate(shard, contributions, counter, stride, pieces, first, seed, tensor):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < pieces:
            own = cuda.local.array((1, WORDS), dtype=types.uint32)
            tile = cuda.local.array((BATCH, WORDS), dtype=types.uint32)
            total = cuda.local.array(PIECE, dtype=types.float32)
            words = cuda.local.array(4, dtype=types.uint32)
            row = contributions + i * BYTES
            if not START:
                load(own, 0, shard + i * BYTES, True)
            for j in range(PIECE):
                total[j] = NOTHING
            for r in range(0, BATCHED, BATCH):
                for u in range(BATCH):
                    load_cs(tile, u, row + (r + u) * stride, True)
                for u in range(BATCH):
                    add(total, tile, u)
            for u in range(REST):
                load_cs(tile, u, row + (BATCHED + u) * stride, True)
            for u in range(REST):
                add(total, tile, u)
            words[0], words[1], words[2], words[3] = philox(
                seed, GRADIENT, first + i, tensor, ldg32(counter)
            )
            for j in range(4):
                a, b = total[2 * j], total[2 * j + 1]
                if not START:
                    a, b = add_rn(low(own, 0, j), a), add_rn(high(own, 0, j), b)
                set_pair_stochastic(own, 0, j, a, b, words[j])
            store(shard + i * BYTES, own, 0, True)

    return accumulate


# ---- launch ------------------------------------------------------------------------------------
def accumulate_launch(
    shard: int, contributions: int, *, ranks: int, stride: int, n: int, first: int = 0,
    start: bool = False, counter: int, seed: int, tensor: int, dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Add `ranks` rows (stride bytes apart, a multiple of 16) to the n elements of shard, in place.

    first: the shard's first element in the whole tensor, a multiple of 8; tensor: its id. start:
    what is in the shard does not count.
    """
    k = kernel(make_accumulate, SIGNATURE, threads=THREADS, ranks=ranks, dtype=dtype, start=start)
    pieces, piece = n // PIECE, first // PIECE
    grid = (cdiv(pieces, THREADS),)
    k(stream, grid, shard, contributions, counter, stride, pieces, piece, seed, tensor)


# ---- cost --------------------------------------------------------------------------------------
def accumulate_bytes(n: int, ranks: int, *, itemsize: int = 2, start: bool = False) -> int:
    """Read the shard and every contribution, write the shard."""
    return n * itemsize * (ranks + 2 - start)


# ---- reference ---------------------------------------------------------------------------------
def accumulate_ref(
    shard: np.ndarray | None,
    contributions: np.ndarray,
    *,
    seed: int,
    tensor: int,
    step: int,
    first: int = 0,
) -> np.ndarray:
    """shard (None: a sum anew) + the float32 sum of contributions (ranks, n), in their format:
    exact."""
    total = contributions[0].astype(np.float32)
    for rank in contributions[1:]:
        total = total + rank.astype(np.float32)
    if shard is not None:
        total = shard.astype(np.float32) + total
    if contributions.dtype == np.float32:
        return total
    bits = random_bits_ref(seed, GRADIENT, total.size, tensor, step, first)
    return round_stochastic_ref(total, bits)


COMPILE_CASES = [
    CompileCase(make_accumulate, {"ranks": r, "dtype": d, "start": s}, SIGNATURE, THREADS)
    for r, d, s in (
        (1, "bf16", False),
        (2, "bf16", True),
        (4, "bf16", False),
        (7, "bf16", False),
        (16, "bf16", False),
        (16, "fp32", True),
        (8, "fp32", False),
    )
]
