"""Flat tensors of any size, eight float32 registers at a time.

Piece i is elements 8 i .. 8 i + 7. A whole piece takes one 16-byte access (two for float32); the
tail, of which `count` elements exist (up to 7, or none where it is below 1), one access an element.
What does not exist loads as 0.

    f = flat("bf16")
    f.load(tile, base, i)              f.load_tail(tile, base, i, count)
    f.unpack(values, tile)             f.round_nearest(tile, values)
    f.round_stochastic(tile, values, words)
    f.store(base, i, tile)             f.store_tail(base, i, tile, count)

tile: local array (1, WORDS) of uint32, the bits as stored. values: local array of 8 float32, in
which rounding leaves the rounded values. words: local array of four uint32, the random bits of
stochastic rounding (unused where the storage is float32).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from llmq_nb.kernels.ptx import ldg16, ldg32, stg16, stg32
from llmq_nb.kernels.vector import PIECE, vector

NO_BITS = np.uint32(0)


@dataclass(frozen=True, slots=True)
class Flat:
    """Device functions for one storage format, as the module docstring lists them."""

    words: int
    """uint32 registers a piece."""
    load: Callable[..., Any]
    load_tail: Callable[..., Any]
    unpack: Callable[..., Any]
    round_stochastic: Callable[..., Any]
    round_nearest: Callable[..., Any]
    store: Callable[..., Any]
    store_tail: Callable[..., Any]


def _make_loads(dtype: str) -> tuple[Any, Any]:
    v = vector(dtype)
    WORDS, BYTES, load_cs = v.words, v.bytes, v.load_cs
    BF16 = dtype == "bf16"

    @cuda.jit(device=True)
    def load(tile, base, i):
        load_cs(tile, 0, base + np.int64(i) * (PIECE * BYTES), True)

    @cuda.jit(device=True)
    def load_tail(tile, base, i, count):
        address = base + np.int64(i) * (PIECE * BYTES)
        for w in range(WORDS):
            tile[0, w] = NO_BITS
        for k in range(PIECE):
            if k < count:
                if BF16:
                    word = np.uint32(ldg16(address + k * 2) << (16 * (k & 1)))
                    tile[0, k >> 1] = np.uint32(tile[0, k >> 1] | word)
                else:
                    tile[0, k] = ldg32(address + k * 4)

    return load, load_tail


def _make_unpack(dtype: str) -> Any:
    v = vector(dtype)
    low, high = v.low, v.high

    @cuda.jit(device=True)
    def unpack(values, tile):
        for j in range(4):
            values[2 * j], values[2 * j + 1] = low(tile, 0, j), high(tile, 0, j)

    return unpack


def _make_rounds(dtype: str) -> tuple[Any, Any]:
    v = vector(dtype)
    low, high, set_pair, set_pair_stochastic = v.low, v.high, v.set_pair, v.set_pair_stochastic

    @cuda.jit(device=True)
    def round_stochastic(tile, values, words):
        for j in range(4):
            set_pair_stochastic(tile, 0, j, values[2 * j], values[2 * j + 1], words[j])
            values[2 * j], values[2 * j + 1] = low(tile, 0, j), high(tile, 0, j)

    @cuda.jit(device=True)
    def round_nearest(tile, values):
        for j in range(4):
            set_pair(tile, 0, j, values[2 * j], values[2 * j + 1])
            values[2 * j], values[2 * j + 1] = low(tile, 0, j), high(tile, 0, j)

    return round_stochastic, round_nearest


def _make_stores(dtype: str) -> tuple[Any, Any]:
    v = vector(dtype)
    BYTES, store_cs = v.bytes, v.store_cs
    BF16 = dtype == "bf16"

    @cuda.jit(device=True)
    def store(base, i, tile):
        store_cs(base + np.int64(i) * (PIECE * BYTES), tile, 0, True)

    @cuda.jit(device=True)
    def store_tail(base, i, tile, count):
        address = base + np.int64(i) * (PIECE * BYTES)
        for k in range(PIECE):
            if k < count:
                if BF16:
                    stg16(address + k * 2, tile[0, k >> 1] >> (16 * (k & 1)))
                else:
                    stg32(address + k * 4, tile[0, k])

    return store, store_tail


@cache
def flat(dtype: str) -> Flat:
    """The device functions for "bf16" or "fp32" storage; loads and stores are streaming."""
    load, load_tail = _make_loads(dtype)
    round_stochastic, round_nearest = _make_rounds(dtype)
    store, store_tail = _make_stores(dtype)
    return Flat(
        words=vector(dtype).words, load=load, load_tail=load_tail, unpack=_make_unpack(dtype),
        round_stochastic=round_stochastic, round_nearest=round_nearest,
        store=store, store_tail=store_tail,
    )  # fmt: skip
