"""Sums and maxima over warps and blocks, in a fixed order: bitwise reproducible, no atomics.

The value comes back to every thread that took part, so that all branch alike on it.
"""

from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.ptx import (
    bf_hi,
    bf_lo,
    f2u,
    fmax,
    ldg32,
    lds32f,
    red_max_g,
    redux_max_u32,
    shfl_xorf,
    smem_addr,
    sts32f,
)

WARP = 32


@cuda.jit(device=True)
def warp_sum(value):
    """Sum over the 32 lanes, float32, five pairwise levels. Every lane must reach the call."""
    for level in range(5):
        value = value + shfl_xorf(value, 16 >> level)
    return value


@cuda.jit(device=True)
def warp_max(value):
    """Largest of the 32 lanes, float32 (NaN only if all are). Every lane must reach the call."""
    for level in range(5):
        value = fmax(value, shfl_xorf(value, 16 >> level))
    return value


@cuda.jit(device=True)
def quad_sum(value):
    """Sum over the 4 lanes that hold one row of an mma accumulator. Every lane must reach the
    call."""
    value = value + shfl_xorf(value, 1)
    return value + shfl_xorf(value, 2)


@cuda.jit(device=True)
def quad_max(value):
    """Largest of the 4 lanes that hold one row of an mma accumulator. Every lane must reach the
    call."""
    value = fmax(value, shfl_xorf(value, 1))
    return fmax(value, shfl_xorf(value, 2))


@cuda.jit(device=True)
def raise_to(slot, largest):
    """Lane 0: raise the uint32 at address `slot` to `largest`. Looking first spares nearly all of
    the atomics; a stale look only costs one, and the result is the maximum in any order."""
    if (cuda.threadIdx.x & 31) == 0 and largest > ldg32(slot):
        red_max_g(slot, largest)


@cuda.jit(device=True)
def absmax_update(slot, running):
    """Raise the float32 at address `slot` to the largest magnitude of the warp's packed bfloat16
    maxima (`running`: uint32 from maxabs2, this lane's). The slot holds 0 or an earlier maximum of
    the same tensor; the order of updates does not matter. Every lane must reach the call."""
    largest = redux_max_u32(f2u(fmax(bf_lo(running), bf_hi(running))))
    raise_to(slot, largest)


def make_block_sum(THREADS: int, VALUES: int = 1):
    """Device function block_sum(tile): sums VALUES float32 (elements of a local array, in place)
    over a block of THREADS threads: five pairwise levels in each warp, then the warps in order.

    Every thread must reach the call; a second call needs no barrier in between if the block
    synchronises once anywhere between the two. Uses 4 * VALUES * THREADS / 32 bytes of shared
    memory.
    """
    WARPS = THREADS // WARP
    SLOTS = WARPS * VALUES

    @cuda.jit(device=True)
    def block_sum(tile):
        for k in range(VALUES):
            tile[k] = warp_sum(tile[k])
        if WARPS > 1:
            partial = smem_addr(cuda.shared.array(SLOTS, dtype=types.float32))
            warp = cuda.threadIdx.x >> 5
            if (cuda.threadIdx.x & 31) == 0:
                for k in range(VALUES):
                    sts32f(partial + (k * WARPS + warp) * 4, tile[k])
            cuda.syncthreads()  # all partial sums are there
            for k in range(VALUES):
                total = lds32f(partial + k * WARPS * 4)
                for w in range(1, WARPS):
                    total = total + lds32f(partial + (k * WARPS + w) * 4)
                tile[k] = total

    return block_sum
