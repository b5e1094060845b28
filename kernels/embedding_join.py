r"""Embedding backward, stage two: add up the pieces of every run that was cut.

    dtable[t] (+)= sum_w sum_p piece[w + p WARPS]     of the pieces of t's run, both sums in order

Shapes   scratch: a float32 row (C,) for each segment of `order` (embedding_backward.py); the pieces
         of a run that begins in segment s lie in s, s + 1, ...
Errors   pieces / WARPS + WARPS float32 additions, one more with accumulate, one rounding.
Cost     Reads the pieces once. A block looks at WARPS segments; most find nothing to do.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    bf16x2,
    bf_lo,
    inc,
    ldg16,
    ldg32,
    ldg32f,
    ldg128f,
    lds32f,
    redux_add_u32,
    shfl_idx,
    smem_addr,
    stg16,
    stg32f,
    sts32f,
)
from llmq_nb.kernels.vector import PIECE, vector

SEGMENT = 32
"""Positions of `order` that a warp of stage one owns; runs are cut at multiples of it."""
THREADS, ROWS = 256, 8
"""Of a block; pieces that a warp has in flight."""
WARPS = THREADS // 32
WARP_COLUMNS = 32 * PIECE
ZERO = np.float32(0.0)
NOBODY = np.uint32(0xFFFFFFFF)  # no token
SIGNATURE = (*(types.uint64,) * 4, types.int32, types.int32)


def make_embedding_join(C: int, accumulate: bool, grad_dtype: str):
    """Piece p of a run goes to warp p % WARPS. Grid: (groups of WARPS segments, groups of 256
    columns)."""
    ACCUMULATE, BF16, SIZE = accumulate, grad_dtype == "bf16", vector(grad_dtype).bytes
    CELLS = WARPS * WARP_COLUMNS

    @cuda.jit(device=True)
    def token_at(tokens, order, position, rows):
        token = NOBODY
        if 0 <= position and position < rows:
            token = ldg32(tokens + np.int64(ldg32(order + np.int64(position) * 4)) * 4)
        return token

    @cuda.jit(device=True)
    def add_pieces(sums, scratch, tokens, order, token, segment, column, rows):
        """sums[0:8] = this warp's pieces of a run that begins in `segment`, in order."""
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        tile = cuda.local.array((ROWS, 8), dtype=types.float32)
        for k in range(8):
            sums[k] = ZERO
        slot = np.int64(segment + warp)
        count = np.uint32(32)
        while count == 32:  # 32 pieces a turn, while all of them belong to the run
            mine = token_at(tokens, order, (slot + lane * WARPS) * SEGMENT, rows) == token
            count = redux_add_u32(1 if mine else 0)
            done = np.uint32(0)
            while done < count:
                for u in range(ROWS):
                    for k in range(8):
                        tile[u, k] = ZERO
                    if done + u < count and column < C:
                        at = scratch + ((slot + (done + u) * WARPS) * C + column) * 4
                        tile[u, 0], tile[u, 1], tile[u, 2], tile[u, 3] = ldg128f(at)
                        tile[u, 4], tile[u, 5], tile[u, 6], tile[u, 7] = ldg128f(at + 16)
                for u in range(ROWS):
                    for k in range(8):
                        sums[k] = sums[k] + tile[u, k]
                done = np.uint32(done + ROWS)
            slot += 32 * WARPS

    def embedding_join(dtable, scratch, tokens, order, rows, V):
        shared = smem_addr(cuda.shared.array(CELLS, dtype=types.float32))
        t = cuda.threadIdx.x
        lane, warp = t & 31, t >> 5
        base = cuda.blockIdx.x * WARPS
        # lane l: the token that segment base - 1 + l begins with
        token = token_at(tokens, order, (base - 1 + lane) * SEGMENT, rows)
        column = cuda.blockIdx.y * WARP_COLUMNS
        sums = cuda.local.array(8, dtype=types.float32)
        k = np.uint32(0)
        while k < WARPS:
            before, own, after = shfl_idx(token, k), shfl_idx(token, k + 1), shfl_idx(token, k + 2)
            if own < V and before != own and after == own:  # a cut run begins, for the whole block
                add_pieces(sums, scratch, tokens, order, own, base + k, column + lane * PIECE, rows)
                cuda.syncthreads()  # the sums of the run before have been read
                for j in range(8):  # column j of every lane together: no bank is met twice
                    sts32f(shared + (warp * WARP_COLUMNS + j * 32 + lane) * 4, sums[j])
                cuda.syncthreads()  # every warp's sums are there
                if column + t < C:
                    total = ZERO
                    for w in range(WARPS):
                        cell = w * WARP_COLUMNS + (t & 7) * 32 + (t >> 3)
                        total = total + lds32f(shared + cell * 4)
                    target = dtable + (np.int64(own) * C + column + t) * SIZE
                    if BF16:
                        if ACCUMULATE:
                            total = bf_lo(ldg16(target)) + total
                        stg16(target, bf16x2(total, ZERO))
                    else:
                        if ACCUMULATE:
                            total = ldg32f(target) + total
                        stg32f(target, total)
            k = inc(k)

    return embedding_join


def embedding_join_launch(
    dtable: int, scratch: int, tokens: int, order: int, *, rows: int, C: int, V: int,
    accumulate: bool, grad_dtype: str, stream: Any,
) -> None:  # fmt: skip
    """Write (or add to) the rows of dtable whose runs were cut."""
    k = kernel(
        make_embedding_join, SIGNATURE, threads=THREADS, C=C, accumulate=accumulate,
        grad_dtype=grad_dtype,
    )  # fmt: skip
    grid = (cdiv(rows, SEGMENT * WARPS), cdiv(C, WARP_COLUMNS))
    k(stream, grid, dtable, scratch, tokens, order, rows, V)


COMPILE_CASES = [
    CompileCase(
        make_embedding_join, {"C": 896, "accumulate": a, "grad_dtype": g}, SIGNATURE, THREADS
    )
    for a, g in [(True, "bf16"), (False, "bf16"), (True, "fp32")]
]
