"""Counter-based random bits: the same on every engine, rank count and step order.

Philox4x32-10 maps (key, counter) to four 32-bit words, ten rounds of two 32x32 -> 64 bit products.

    key      = (seed, purpose)
    counter  = (index / 8 low word, index / 8 high word, tensor id, update)

One call serves eight consecutive elements of a tensor with 16 bits each: element `index` takes the
low half (even index) or the high half (odd index) of word (index % 8) / 2. Shards are cut at
multiples of 1024 elements, so neither sharding nor the purpose ever shares or changes bits.

Source   Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". Written
from the paper.
"""

import enum

import numpy as np
from numpy.typing import NDArray

M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W0, W1 = 0x9E3779B9, 0xBB67AE85
LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
ROUNDS = 10


class Purpose(enum.IntEnum):
    """What the bits are for: the second word of the key, so no two uses share bits."""

    MASTER = 1
    M = 2
    V = 3
    GRADIENT = 4
    INIT = 5
    SAMPLE = 6


def philox(counter: tuple[NDArray | int, ...], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Four words for each counter: (n, 4) uint32. counter: four uint32 arrays of n, or integers."""
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) for c in np.broadcast_arrays(*counter))
    k0, k1 = key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF
    for _ in range(ROUNDS):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1 = (p1 >> SHIFT) ^ c1 ^ np.uint64(k0), p1 & LOW
        c2, c3 = (p0 >> SHIFT) ^ c3 ^ np.uint64(k1), p0 & LOW
        k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def words(
    first: int, count: int, *, seed: int, purpose: Purpose, tensor_id: int, update: int
) -> NDArray[np.uint32]:
    """Words of the elements first .. first + count - 1 in groups of eight: (ceil, 4) uint32.

    first: a multiple of 8. update: step * grad_accumulation + micro_step.
    """
    if first % 8:
        raise ValueError(f"{first=} is not a multiple of 8")
    group = np.arange(first // 8, (first + count + 7) // 8, dtype=np.uint64)
    counter = (group & LOW, group >> SHIFT, tensor_id & 0xFFFFFFFF, update & 0xFFFFFFFF)
    return philox(counter, (seed, int(purpose)))


def bits16(
    first: int, count: int, *, seed: int, purpose: Purpose, tensor_id: int, update: int
) -> NDArray[np.uint16]:
    """16 random bits for each of the elements first .. first + count - 1 of a flattened tensor."""
    w = words(first, count, seed=seed, purpose=purpose, tensor_id=tensor_id, update=update)
    return w.astype("<u4").view("<u2").reshape(-1)[:count].astype(np.uint16, copy=False)


def normal(first: int, count: int, *, seed: int, tensor_id: int) -> NDArray[np.float32]:
    """Standard normal float32 values by Box-Muller, of the elements first .. first + count - 1.

    16 bits would be too coarse, so the counter's first words are element / 4: the four words of a
    group are two pairs (u, v), and each pair gives two values,
    r cos(2 pi v / 2^32) and r sin(2 pi v / 2^32) with r = sqrt(-2 ln((u + 1) / 2^32)).
    """
    group = np.arange(first // 4, (first + count + 3) // 4, dtype=np.uint64)
    w = philox((group & LOW, group >> SHIFT, tensor_id, 0), (seed, int(Purpose.INIT)))
    u = (w[:, 0::2].astype(np.float64) + 1.0) / 2.0**32
    angle = w[:, 1::2].astype(np.float64) * (2.0 * np.pi / 2.0**32)
    radius = np.sqrt(-2.0 * np.log(u))
    z = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1)
    offset = first % 4
    return z[offset : offset + count].astype(np.float32)
