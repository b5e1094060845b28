r"""AdamW with stochastic rounding, one launch a tensor.

    g = clip grad;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    master -= learning_rate (m / correction1 / (sqrt(v / correction2) + epsilon) + decay master)
    weight = round(master)          (to nearest; where the master copy has a working copy beside it)
    absmax = max |weight|           (optional; of the rounded value)

Nothing but the absmax is written if the norm is not finite: then it is that of the old weight.

Shapes   n elements of a flattened tensor, or of its shard that begins at element `first`, a
         multiple of 1024.
Dtypes   master: float32 or bfloat16; m: float32, bfloat16, or e4m3 with a float32 scale for every
         128 values (moment_e4m3.py); v: float32 or bfloat16; grad: bfloat16 or float32; weight: a
         bfloat16 working copy, or none where the products read the master copy itself.
         In device memory, so that a graph can hold the launch:
         scalars: learning_rate, inv_supervised, correction1, correction2 (float32), update (uint32)
         total:   norm, clip factor, 1 if finite else 0 (float32), from global_norm
Errors   Every operation is rounded to nearest float32 in the written order, without fused
         multiply-adds: bit for bit NumPy's while |m|, v are 0 or above 2^-100. Division and root
         are the instructions that ptxas makes of div.rn and sqrt.rn (the same for sm_80 to sm_120)
         without their branches; what overflows or is no number is done again by the full ones.
         Storage below float32 is rounded stochastically (random.py), with bits of (seed, purpose,
         element, tensor, update) alone.
Cost     Reads master, m, v, grad once and writes master, m, v (and weight) once. All in bfloat16
         it is 14 bytes to some 75 instructions an element: close to what an H200 can issue.
Source   Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2. Division: Markstein 1990.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.core.rng import Purpose
from llmq_nb.kernels import moment_e4m3
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase, Options
from llmq_nb.kernels.flat import flat
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    add_rn,
    div_rn,
    f2u,
    ffma,
    fmax,
    fnma,
    ldg32,
    ldg32f,
    mul_rn,
    rcp,
    rsqrt,
    sqrt_rn,
    stg32,
    stg32f,
)
from llmq_nb.kernels.random import philox
from llmq_nb.kernels.vector import PIECE, vector

THREADS = 128
OPTIONS = Options(min_blocks=8)
SHARD_MULTIPLE = 1024
MASTER, M, V = int(Purpose.MASTER), int(Purpose.M), int(Purpose.V)
ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
SMALLEST_NORMAL = np.float32(2.0**-126)
NO_BITS, MAGNITUDE = np.uint32(0), np.uint32(0x7FFFFFFF)
SIGNATURE = (
    *(types.uint64,) * 9, types.int64, types.int64, *(types.float32,) * 6, types.uint32,
    types.uint32,
)  # fmt: skip
SCALARS_SIGNATURE = (types.uint64, types.uint64, *(types.float32,) * 4, types.uint32)


@cuda.jit(device=True)
def reciprocal(y):
    """1 / y as the hardware's own division refines it."""
    r = rcp(y)
    return ffma(r, fnma(y, r, ONE), r)


@cuda.jit(device=True)
def divide(x, y, inverse):
    """x / y rounded to nearest, given inverse = reciprocal(y): the common path of the hardware's
    division, without its branch. Not for |x| below 2^-100 (but 0), nor y beyond 2^+-100."""
    q = mul_rn(x, inverse)
    return ffma(fnma(q, y, x), inverse, q)


@cuda.jit(device=True)
def square_root(x):
    """Root of x, 0 or above 2^-101, rounded to nearest: likewise."""
    r = rsqrt(fmax(x, SMALLEST_NORMAL))  # 0 * infinity would be NaN
    s = mul_rn(x, r)
    return ffma(fnma(s, s, x), mul_rn(r, HALF), s)


@cuda.jit(device=True)
def quotients(step, m, v, c1, c2, epsilon):
    """step[0:8] = (m / c1) / (sqrt(v / c2) + epsilon), each operation rounded to nearest."""
    inverse1, inverse2 = reciprocal(c1), reciprocal(c2)
    check = ZERO
    for k in range(8):
        root = add_rn(square_root(divide(v[k], c2, inverse2)), epsilon)
        step[k] = divide(divide(m[k], c1, inverse1), root, reciprocal(root))
        check = ffma(step[k], ZERO, check)
    if (f2u(check) & MAGNITUDE) != 0:  # not a number: something left the range of the quick way
        for k in range(8):
            root = add_rn(sqrt_rn(div_rn(v[k], c2)), epsilon)
            step[k] = div_rn(div_rn(m[k], c1), root)


def make_adamw(master: str, m: str, v: str, grad: str, copy: bool, absmax: bool):
    """Kernel for one set of storage formats; arguments are device addresses (0 where unused)."""
    p_, v_, g_, w_ = flat(master), flat(v), flat(grad), flat("bf16")
    m_ = flat("fp32" if m == "e4m3" else m)
    load_p, load_v, load_g, load_m = p_.load, v_.load, g_.load, m_.load
    tail_p, tail_v, tail_g, tail_m = p_.load_tail, v_.load_tail, g_.load_tail, m_.load_tail
    unpack_p, unpack_v, unpack_g, unpack_m = p_.unpack, v_.unpack, g_.unpack, m_.unpack
    round_p, round_v, round_m = p_.round_stochastic, v_.round_stochastic, m_.round_stochastic
    nearest_w, store_w, end_w = w_.round_nearest, w_.store, w_.store_tail
    store_p, store_v, store_m = p_.store, v_.store, m_.store
    end_p, end_v, end_m = p_.store_tail, v_.store_tail, m_.store_tail
    P_WORDS, V_WORDS, G_WORDS, M_WORDS = p_.words, v_.words, g_.words, m_.words
    load_m8, store_m8 = moment_e4m3.load, moment_e4m3.store
    RANDOM_P, RANDOM_M, RANDOM_V = master == "bf16", m != "fp32", v == "bf16"
    COPY, ABSMAX, M_E4M3 = copy, absmax, m == "e4m3"
    kept = vector("bf16" if copy else master)
    W_WORDS, track, absmax_update = kept.words, kept.track, kept.absmax_update

    def adamw(
        master, weight, moment1, moment2, grad, m_scale, slot, scalars, total, n, start, beta1,
        rest1, beta2, rest2, epsilon, decay, seed, tensor,
    ):  # fmt: skip
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        count = n - i * PIECE
        whole = count >= PIECE
        p = cuda.local.array(8, dtype=types.float32)
        g = cuda.local.array(8, dtype=types.float32)
        m1 = cuda.local.array(8, dtype=types.float32)
        m2 = cuda.local.array(8, dtype=types.float32)
        words = cuda.local.array(4, dtype=types.uint32)
        tile_p = cuda.local.array((1, P_WORDS), dtype=types.uint32)
        tile_w = cuda.local.array((1, W_WORDS), dtype=types.uint32)  # of the weight
        tile_g = cuda.local.array((1, G_WORDS), dtype=types.uint32)
        tile_m = cuda.local.array((1, M_WORDS), dtype=types.uint32)
        tile_v = cuda.local.array((1, V_WORDS), dtype=types.uint32)
        finite, clip = ldg32(total + 8), ldg32f(total + 4)
        rate, update = -ldg32f(scalars), ldg32(scalars + 16)
        c1, c2 = ldg32f(scalars + 8), ldg32f(scalars + 12)
        if whole:  # one branch for all the loads, and nothing waits between them
            load_p(tile_p, master, i)
            load_g(tile_g, grad, i)
            if not M_E4M3:
                load_m(tile_m, moment1, i)
            load_v(tile_v, moment2, i)
        else:
            tail_p(tile_p, master, i, count)
            tail_g(tile_g, grad, i, count)
            if not M_E4M3:
                tail_m(tile_m, moment1, i, count)
            tail_v(tile_v, moment2, i, count)
        if M_E4M3:
            load_m8(m1, moment1, m_scale, i, count)
        unpack_p(p, tile_p)
        if finite != 0:
            unpack_g(g, tile_g)
            unpack_v(m2, tile_v)
            if not M_E4M3:
                unpack_m(m1, tile_m)
            for k in range(8):
                gk = mul_rn(g[k], clip)
                m1[k] = add_rn(mul_rn(beta1, m1[k]), mul_rn(rest1, gk))
                m2[k] = add_rn(mul_rn(beta2, m2[k]), mul_rn(mul_rn(rest2, gk), gk))
            quotients(g, m1, m2, c1, c2, epsilon)
            for k in range(8):
                p[k] = add_rn(p[k], mul_rn(rate, add_rn(g[k], mul_rn(decay, p[k]))))
            if RANDOM_V:
                words[0], words[1], words[2], words[3] = philox(seed, V, start + i, tensor, update)
            round_v(tile_v, m2, words)
            if RANDOM_M:
                words[0], words[1], words[2], words[3] = philox(seed, M, start + i, tensor, update)
            if M_E4M3:
                store_m8(m1, moment1, m_scale, i, count, words)
            else:
                round_m(tile_m, m1, words)
            if RANDOM_P:
                a, b, c, d = philox(seed, MASTER, start + i, tensor, update)
                words[0], words[1], words[2], words[3] = a, b, c, d
            round_p(tile_p, p, words)
            if COPY:
                nearest_w(tile_w, p)
            if whole:
                store_v(moment2, i, tile_v)
                if not M_E4M3:
                    store_m(moment1, i, tile_m)
                store_p(master, i, tile_p)
                if COPY:
                    store_w(weight, i, tile_w)
            else:
                end_v(moment2, i, tile_v, count)
                if not M_E4M3:
                    end_m(moment1, i, tile_m, count)
                end_p(master, i, tile_p, count)
                if COPY:
                    end_w(weight, i, tile_w, count)
        elif COPY and ABSMAX:
            nearest_w(tile_w, p)
        if ABSMAX:  # of the old weight where nothing was written
            running = NO_BITS
            for j in range(4):
                if COPY:
                    running = track(running, tile_w, 0, j)
                else:
                    running = track(running, tile_p, 0, j)
            absmax_update(slot, running)

    return adamw


def adamw_launch(
    master: int, weight: int, m: int, v: int, grad: int, *, n: int, first: int = 0, scalars: int,
    total: int, m_scale: int = 0, absmax: int = 0, beta1: float, beta2: float, epsilon: float,
    decay: float, seed: int, tensor: int, master_dtype: str = "fp32", m_dtype: str = "fp32",
    v_dtype: str = "fp32", grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Update n elements in place, in stream order. weight: 0 if it is the master copy itself.

    first: the shard's first element in its tensor, a multiple of 1024; tensor: its id. m_scale:
    scales of an e4m3 m, from this shard's first group on. scalars, total: module docstring."""
    k = kernel(
        make_adamw, SIGNATURE, threads=THREADS, options=OPTIONS, copy=bool(weight),
        absmax=bool(absmax), master=master_dtype, m=m_dtype, v=v_dtype, grad=grad_dtype,
    )  # fmt: skip
    one, b1, b2 = np.float32(1.0), np.float32(beta1), np.float32(beta2)
    k(
        stream, (cdiv(n, THREADS * PIECE),), master, weight, m, v, grad, m_scale, absmax, scalars,
        total, n, first // PIECE, b1, one - b1, b2, one - b2, epsilon, decay, seed, tensor,
    )  # fmt: skip


def make_set_scalars():
    """Write scalars and total of a step without clipping, for `update`."""

    def set_scalars(scalars, total, rate, correction1, correction2, clip, counter):
        stg32f(scalars, rate)
        stg32f(scalars + 8, correction1)
        stg32f(scalars + 12, correction2)
        stg32(scalars + 16, counter)
        stg32f(total + 4, clip)
        stg32f(total + 8, ONE)

    return set_scalars


def update(
    master: Any, m: Any, v: Any, grad: Any, *, step: int, learning_rate: float,
    beta1: float = 0.9, beta2: float = 0.95, epsilon: float = 1e-8, weight_decay: float = 0.1,
    clip: float = 1.0, weight: Any = None, seed: int = 0, tensor: int = 0,
) -> None:  # fmt: skip
    """One AdamW step in place on GPU arrays of one shape; `step` counts from 0.

    master, m, v, grad: float32 or bfloat16 each (bfloat16 master, m, v round stochastically).
    weight: an optional bfloat16 working copy. clip: factor of the gradient. tensor: any number that
    tells this tensor's random bits from another's. ValueError on other shapes or dtypes.

    >>> adamw.update(master, m, v, grad, step=0, learning_rate=1e-3)
    """
    a = _describe_float(master, None, "master")
    arrays = {"m": m, "v": v, "grad": grad}
    found = {name: _describe_float(x, a.shape, name) for name, x in arrays.items()} | {"master": a}
    copy = 0
    if weight is not None:
        copy = describe(weight, dtype=DType.BF16, shape=a.shape, name="weight").address
    small = empty_like(a, shape=(8,), dtype=DType.FP32)
    scalars, stream = describe(small, dtype=DType.FP32).address, current_stream(a)
    total = scalars + 20
    corrections = (1.0 - beta1 ** (step + 1), 1.0 - beta2 ** (step + 1))
    kernel(make_set_scalars, SCALARS_SIGNATURE, threads=1)(
        stream, (1,), scalars, total, learning_rate, *corrections, clip, step
    )
    adamw_launch(
        a.address, copy, *(found[name].address for name in ("m", "v", "grad")), n=a.size,
        scalars=scalars, total=total, beta1=beta1, beta2=beta2, epsilon=epsilon,
        decay=weight_decay, seed=seed, tensor=tensor, stream=stream,
        **{f"{name}_dtype": x.dtype.value for name, x in found.items()},
    )  # fmt: skip


def _describe_float(x: Any, shape: tuple[int, ...] | None, name: str) -> Any:
    try:
        return describe(x, dtype=DType.FP32, shape=shape, name=name)
    except ValueError as error:
        if "must be fp32" not in str(error):
            raise
        return describe(x, dtype=DType.BF16, shape=shape, name=name)


# ---- cost --------------------------------------------------------------------------------------
def adamw_bytes(n: int, *, master: int, m: float, v: int, grad: int, copy: bool) -> int:
    """Least DRAM traffic of n elements with these bytes each (e4m3 m: 1 + 4 / 128)."""
    return round(n * (2 * (master + m + v) + grad + (2 if copy else 0)))


# ---- reference ---------------------------------------------------------------------------------
def adamw_ref(
    master: np.ndarray, m: np.ndarray, v: np.ndarray, grad: np.ndarray, *, rate: float,
    beta1: float, beta2: float, epsilon: float, decay: float, step: int, clip: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """float64 NumPy oracle: (master, m, v) before rounding to storage, the equations and no
    more."""
    p64, m64, v64, g64 = (a.astype(np.float64) for a in (master, m, v, grad))
    g64 = clip * g64
    m64, v64 = beta1 * m64 + (1 - beta1) * g64, beta2 * v64 + (1 - beta2) * g64**2
    m_hat, v_hat = m64 / (1 - beta1 ** (step + 1)), v64 / (1 - beta2 ** (step + 1))
    return p64 - rate * (m_hat / (np.sqrt(v_hat) + epsilon) + decay * p64), m64, v64


COMPILE_CASES = [
    CompileCase(
        make_adamw,
        {"master": p, "m": m, "v": v, "grad": g, "copy": c, "absmax": absmax},
        SIGNATURE,
        THREADS,
        options=OPTIONS,
    )
    for p, m, v, g, c, absmax in [
        ("fp32", "fp32", "fp32", "bf16", True, True),
        ("fp32", "fp32", "fp32", "fp32", True, False),
        ("bf16", "bf16", "bf16", "bf16", False, False),
        ("bf16", "bf16", "bf16", "bf16", False, True),
        ("bf16", "fp32", "fp32", "bf16", False, False),
        ("bf16", "e4m3", "bf16", "bf16", False, True),
        ("fp32", "fp32", "fp32", "fp32", False, False),
    ]
] + [CompileCase(make_set_scalars, {}, SCALARS_SIGNATURE, 1)]
