"""Counter-based random bits and stochastic rounding to bfloat16.

Philox4x32-10: four 32-bit words from a key (seed, purpose) and a counter. One call serves the 8
elements of a piece: bits of element 8 i + k are the low (k even) or high (k odd) half of word k /
2.

    counter = (i low, i high, tensor id, step * grad_accumulation + micro_step)      i = element / 8

So bits depend on what is rounded, never on launch geometry or sharding (shards start at multiples
of 1024 elements). Stochastic rounding adds the 16 bits to the float32 pattern and drops the low
half:

    P(round up) = (distance above the lower neighbour) / (distance of the neighbours), exact to
    2^-16

Infinities and NaN are kept (NaN with all bits set would carry into the sign otherwise).
Source    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3; constants of
          Random123.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numba import cuda

from llmq_nb.core.rng import Purpose  # noqa: F401  kernels take it from here
from llmq_nb.kernels.ptx import f2u, high32, low32, mulhi, mullo, prmt, xor3

M0, M1 = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)  # multipliers of the two lanes
W0, W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)  # key increments a round
ROUNDS = 10
LOW_HALF, HALF_BITS = np.uint32(0xFFFF), np.uint32(16)
EXPONENT = np.uint32(0x7F800000)
ZERO_BITS = np.uint32(0)
PACK_HIGH = np.uint32(0x7632)  # prmt: high half of the first, high half of the second


@cuda.jit(device=True)
def philox(seed, purpose, piece, tensor, step):
    """Four uint32 words for piece number `piece` (64-bit); seed, purpose, tensor, step: uint32."""
    c0, c1 = low32(piece), high32(piece)
    c2, c3 = np.uint32(tensor), np.uint32(step)
    k0, k1 = np.uint32(seed), np.uint32(purpose)
    for _ in range(ROUNDS):
        high0, low0 = mulhi(M0, c0), mullo(M0, c0)
        high1, low1 = mulhi(M1, c2), mullo(M1, c2)
        c0, c1 = xor3(high1, c1, k0), low1
        c2, c3 = xor3(high0, c3, k1), low0
        k0, k1 = np.uint32(k0 + W0), np.uint32(k1 + W1)
    return c0, c1, c2, c3


@cuda.jit(device=True)
def round_stochastic(value, bits):
    """float32 -> uint32 whose high half is the bfloat16; bits: uint32 below 2^16. Low half:
    rubbish."""
    pattern = f2u(value)
    finite = (pattern & EXPONENT) != EXPONENT
    return np.uint32(pattern + (bits if finite else ZERO_BITS))


@cuda.jit(device=True)
def pack_stochastic(low, high, word):
    """Two float32 -> packed bfloat16 pair, rounded with the low and high half of one random
    word."""
    a = round_stochastic(low, word & LOW_HALF)
    b = round_stochastic(high, word >> HALF_BITS)
    return prmt(a, b, PACK_HIGH)


# ---- reference ---------------------------------------------------------------------------------
def philox_ref(seed: int, purpose: int, piece: npt.ArrayLike, tensor: int, step: int) -> np.ndarray:
    """NumPy Philox4x32-10: uint32 (..., 4) for uint64 piece numbers."""
    index = np.asarray(piece, np.uint64)
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = [index & mask, index >> shift, np.full_like(index, tensor), np.full_like(index, step)]
    key = [seed & 0xFFFFFFFF, purpose]
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        counter = [
            (p1 >> shift) ^ counter[1] ^ np.uint64(key[0]),
            p1 & mask,
            (p0 >> shift) ^ counter[3] ^ np.uint64(key[1]),
            p0 & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(counter, axis=-1).astype(np.uint32)


def random_bits_ref(
    seed: int, purpose: int, count: int, tensor: int, step: int, start: int = 0
) -> np.ndarray:
    """uint16 bits of elements start .. start + count (start a multiple of 8)."""
    pieces = np.arange(start // 8, (start + count + 7) // 8, dtype=np.uint64)
    words = philox_ref(seed, purpose, pieces, tensor, step)
    return np.stack([words & 0xFFFF, words >> 16], axis=-1).astype(np.uint16).reshape(-1)[:count]


def round_stochastic_ref(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """float32 -> ml_dtypes bfloat16 with the given uint16 bits, by neighbours: up where the
    discarded fraction of the magnitude plus bits / 2^16 reaches one."""
    pattern = np.asarray(x, np.float32).view(np.uint32)
    lower, fraction = pattern >> 16, pattern & 0xFFFF
    up = fraction + bits.astype(np.uint32) >= 0x10000
    rounded = np.where(up & np.isfinite(x), lower + 1, lower).astype(np.uint16)
    return rounded.view(ml_dtypes.bfloat16)
