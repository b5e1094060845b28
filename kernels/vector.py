"""Pieces of 8 values in registers, the same kernel text for bfloat16 and float32 storage.

A tile is a `cuda.local.array((PIECES, WORDS), uint32)`: a row of WORDS registers holds one piece,
packed pairs for bfloat16 (one 16-byte access), plain bits for float32 (two). `vector(dtype)` gives
the device functions; factories bind the ones they use to local names, which Numba reads as
constants:

    v = vector(dtype)
    WORDS, BYTES, load, low, high, set_pair, store = v.words, v.bytes, v.load, v.low, ...

    load(tile, i, address, inside)       tile[i] = 8 values, zeros where not inside (nothing is
    read) load_nc, load_cs                     through the read-only path; streaming (read once)
    store(address, tile, i, inside)      and store_cs
    low(tile, i, j), high(tile, i, j)    values 2 j and 2 j + 1 of piece i as float32
    set_pair(tile, i, j, a, b)           round two float32 to the storage format
    set_pair_stochastic(..., word)       the same with 16 random bits each (float32 storage: exact)
    track(running, tile, i, j)           running maxima of magnitudes, a uint32 that starts at 0
    absmax_update(slot, running)         raise the float32 at an address to the warp's; all lanes
    call

Rows start at multiples of 16 bytes and hold whole pieces: C is a multiple of 8.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from llmq_nb.kernels.ptx import (
    bf16x2,
    bf_hi,
    bf_lo,
    f2u,
    ldg128,
    ldg128_cs,
    ldg128_nc,
    maxabs2,
    redux_max_u32,
    stg128,
    stg128_cs,
    u2f,
)
from llmq_nb.kernels.random import pack_stochastic
from llmq_nb.kernels.reduce import absmax_update as _absmax_update_bf16
from llmq_nb.kernels.reduce import raise_to

PIECE = 8
"""Values of a piece."""
MAGNITUDE = np.uint32(0x7FFFFFFF)
ZERO_BITS = np.uint32(0)


@dataclass(frozen=True, slots=True)
class Vector:
    """Device functions for one storage format, as the module docstring lists them."""

    words: int
    """uint32 registers a piece."""
    bytes: int
    """Bytes a value."""
    load: Callable[..., Any]
    load_nc: Callable[..., Any]
    load_cs: Callable[..., Any]
    store: Callable[..., Any]
    store_cs: Callable[..., Any]
    low: Callable[..., Any]
    high: Callable[..., Any]
    set_pair: Callable[..., Any]
    set_pair_stochastic: Callable[..., Any]
    track: Callable[..., Any]
    absmax_update: Callable[..., Any]


def _make_load(instruction: Any, WORDS: int) -> Any:
    @cuda.jit(device=True)
    def load(tile, i, address, inside):
        if inside:
            for w in range(0, WORDS, 4):
                a, b, c, d = instruction(address + w * 4)
                tile[i, w], tile[i, w + 1], tile[i, w + 2], tile[i, w + 3] = a, b, c, d
        else:
            for w in range(WORDS):
                tile[i, w] = ZERO_BITS

    return load


def _make_store(instruction: Any, WORDS: int) -> Any:
    @cuda.jit(device=True)
    def store(address, tile, i, inside):
        if inside:
            for w in range(0, WORDS, 4):
                piece = (tile[i, w], tile[i, w + 1], tile[i, w + 2], tile[i, w + 3])
                instruction(address + w * 4, piece)

    return store


# ---- bfloat16 ----------------------------------------------------------------------------------
@cuda.jit(device=True)
def _low_bf16(tile, i, j):
    return bf_lo(tile[i, j])


@cuda.jit(device=True)
def _high_bf16(tile, i, j):
    return bf_hi(tile[i, j])


@cuda.jit(device=True)
def _set_pair_bf16(tile, i, j, a, b):
    tile[i, j] = bf16x2(a, b)


@cuda.jit(device=True)
def _set_pair_stochastic_bf16(tile, i, j, a, b, word):
    tile[i, j] = pack_stochastic(a, b, word)


@cuda.jit(device=True)
def _track_bf16(running, tile, i, j):
    return maxabs2(running, tile[i, j])


# ---- float32 -----------------------------------------------------------------------------------
@cuda.jit(device=True)
def _low_fp32(tile, i, j):
    return u2f(tile[i, 2 * j])


@cuda.jit(device=True)
def _high_fp32(tile, i, j):
    return u2f(tile[i, 2 * j + 1])


@cuda.jit(device=True)
def _set_pair_fp32(tile, i, j, a, b):
    tile[i, 2 * j] = f2u(a)
    tile[i, 2 * j + 1] = f2u(b)


@cuda.jit(device=True)
def _set_pair_stochastic_fp32(tile, i, j, a, b, word):
    tile[i, 2 * j] = f2u(a)
    tile[i, 2 * j + 1] = f2u(b)


@cuda.jit(device=True)
def _track_fp32(running, tile, i, j):
    a = np.uint32(tile[i, 2 * j] & MAGNITUDE)
    b = np.uint32(tile[i, 2 * j + 1] & MAGNITUDE)
    return max(max(running, a), b)


@cuda.jit(device=True)
def _absmax_update_fp32(slot, running):
    raise_to(slot, redux_max_u32(running))


@cache
def vector(dtype: str) -> Vector:
    """The device functions for "bf16" or "fp32" storage."""
    words = {"bf16": 4, "fp32": 8}[dtype]
    loads = {
        name: _make_load(instruction, words)
        for name, instruction in (("load", ldg128), ("load_nc", ldg128_nc), ("load_cs", ldg128_cs))
    }
    stores = {
        name: _make_store(instruction, words)
        for name, instruction in (("store", stg128), ("store_cs", stg128_cs))
    }
    if dtype == "bf16":
        return Vector(
            words=words,
            bytes=2,
            **loads,
            **stores,
            low=_low_bf16,
            high=_high_bf16,
            set_pair=_set_pair_bf16,
            set_pair_stochastic=_set_pair_stochastic_bf16,
            track=_track_bf16,
            absmax_update=_absmax_update_bf16,
        )
    return Vector(
        words=words,
        bytes=4,
        **loads,
        **stores,
        low=_low_fp32,
        high=_high_fp32,
        set_pair=_set_pair_fp32,
        set_pair_stochastic=_set_pair_stochastic_fp32,
        track=_track_fp32,
        absmax_update=_absmax_update_fp32,
    )
