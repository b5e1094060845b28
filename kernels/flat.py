"""Flat tensors of any size, eight float32 registers at a time.

Piece i is elements 8 i .. 8 i + 7. `count` is how many of them exist: 8 or more takes one 16-byte
access (two for float32), 1 to 7 (the tail) one access an element, 0 or less none. What does not
exist loads as 0.

    load = make_load("bf16");                 load(values, base, i, count)
    store = make_store("bf16", True);         store(values, base, i, count, words)

values: local array of 8 float32; a store leaves the rounded values in it. words: local array of
four uint32, the random bits of a stochastic store (unused where the storage is float32 or the store
rounds to nearest).
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.ptx import ldg16, ldg32, stg16, stg32
from llmq_nb.kernels.vector import PIECE, vector

NO_BITS = np.uint32(0)


@cache
def make_load(dtype: str) -> Any:
    """Device function load(values, base, i, count), streaming."""
    v = vector(dtype)
    WORDS, BYTES, load_cs, low, high = v.words, v.bytes, v.load_cs, v.low, v.high
    BF16 = dtype == "bf16"

    @cuda.jit(device=True)
    def load(values, base, i, count):
        tile = cuda.local.array((1, WORDS), dtype=types.uint32)
        address = base + np.int64(i) * (PIECE * BYTES)
        load_cs(tile, 0, address, count >= PIECE)
        if count < PIECE:
            for k in range(PIECE):
                if k < count:
                    if BF16:
                        word = ldg16(address + k * 2)
                        if (k & 1) == 0:
                            tile[0, k >> 1] = word
                        else:
                            tile[0, k >> 1] = np.uint32(tile[0, k >> 1] | np.uint32(word << 16))
                    else:
                        tile[0, k] = ldg32(address + k * 4)
        for j in range(4):
            values[2 * j], values[2 * j + 1] = low(tile, 0, j), high(tile, 0, j)

    return load


@cache
def make_store(dtype: str, stochastic: bool) -> Any:
    """Device function store(values, base, i, count, words), streaming; it rounds once."""
    v = vector(dtype)
    WORDS, BYTES, store_cs, low, high = v.words, v.bytes, v.store_cs, v.low, v.high
    set_pair, set_pair_stochastic = v.set_pair, v.set_pair_stochastic
    BF16, STOCHASTIC = dtype == "bf16", stochastic

    @cuda.jit(device=True)
    def store(values, base, i, count, words):
        tile = cuda.local.array((1, WORDS), dtype=types.uint32)
        address = base + np.int64(i) * (PIECE * BYTES)
        for j in range(4):
            if STOCHASTIC:
                set_pair_stochastic(tile, 0, j, values[2 * j], values[2 * j + 1], words[j])
            else:
                set_pair(tile, 0, j, values[2 * j], values[2 * j + 1])
        for j in range(4):
            values[2 * j], values[2 * j + 1] = low(tile, 0, j), high(tile, 0, j)
        store_cs(address, tile, 0, count >= PIECE)
        if count < PIECE:
            for k in range(PIECE):
                if k < count:
                    if BF16:
                        stg16(address + k * 2, tile[0, k >> 1] >> (16 * (k & 1)))
                    else:
                        stg32(address + k * 4, tile[0, k])

    return store
