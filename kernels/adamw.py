r"""AdamW with decoupled weight decay, stochastic rounding and the work copy's absmax in one pass.

    g = clip * grad                                     clip, finite: from global_norm, on the
    device m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    p = p - learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay
    p) weights = bfloat16(p),   absmax = max |weights|

in float32 registers; p is the master weight. If `finite` is 0, nothing but absmax is written.

Shapes   master, weights, m, v, grad: n elements, a multiple of 8, starting at element `start` (a
         multiple of 8) of the whole tensor. scalars: SCALARS words, norm: the NORM words of
         global_norm.py.
Dtypes   master, m, v, grad: bfloat16 or float32 each; weights bfloat16 (address 0: the master
         itself is what products read). absmax float32, 0 before.
         scalars: learning_rate, 1 / (1 - beta1^t), 1 / (1 - beta2^t) float32; step uint32.
Rounding bfloat16 master, m and v round stochastically: Philox key (seed, MASTER | M | V), counter
(element
         / 8, tensor id, step), see random.py. float32 ones are stored as they are, and then weights
         round to nearest even. Bits do not depend on sharding.
Errors   m, v: three operations each, 3 * 2^-24 of the larger term. Update: sqrt.approx and
         rcp.approx, relative 2^-21 with the products. v / (1 - beta2^t) below 2^-126 counts as 0.
Cost     Every operand once: 22 bytes an element for bfloat16 master and gradient, float32 m and v.
Source   Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2. Written from the equations.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, upload_like
from llmq_nb.kernels.compile import CompileCase, Options
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ffma, ldg32, ldg32f, rcp, sqrtf
from llmq_nb.kernels.random import Purpose, philox
from llmq_nb.kernels.vector import PIECE, vector

THREADS = 512  # 1.5 % faster than 256 on an H200 in the experiments
OPTIONS = Options(min_blocks=2)  # at most 64 registers
LEARNING_RATE, CORRECTION1, CORRECTION2, STEP, SCALARS = 0, 1, 2, 3, 4
"""Word numbers in `scalars`, and their count."""
CLIP, FINITE = 1, 2  # word numbers in `norm`
MASTER, M, V = int(Purpose.MASTER), int(Purpose.M), int(Purpose.V)
NO_BITS = np.uint32(0)
SIGNATURE = (
    *(types.uint64,) * 8, *(types.int64,) * 2, *(types.float32,) * 4, *(types.uint32,) * 2
)  # fmt: skip


def make_adamw(master: str, moment1: str, moment2: str, grad: str, weights: bool, absmax: bool):
    """Kernel for one set of storage formats; weights: whether there is a work copy."""
    pv, mv, vv, gv, wv = (vector(d) for d in (master, moment1, moment2, grad, "bf16"))
    PW, MW, VW, GW, WW = pv.words, mv.words, vv.words, gv.words, wv.words
    PB, MB, VB, GB, WB = (x.bytes * PIECE for x in (pv, mv, vv, gv, wv))
    load_p, low_p, high_p, set_p, store_p = (
        pv.load_cs, pv.low, pv.high, pv.set_pair_stochastic, pv.store_cs
    )  # fmt: skip
    load_m, low_m, high_m, set_m, store_m = (
        mv.load_cs, mv.low, mv.high, mv.set_pair_stochastic, mv.store_cs
    )  # fmt: skip
    load_v, low_v, high_v, set_v, store_v = (
        vv.load_cs, vv.low, vv.high, vv.set_pair_stochastic, vv.store_cs
    )  # fmt: skip
    load_g, low_g, high_g = gv.load_cs, gv.low, gv.high
    set_w, store_w, track, absmax_update = wv.set_pair, wv.store, wv.track, wv.absmax_update
    ROUND_P, ROUND_M, ROUND_V = master == "bf16", moment1 == "bf16", moment2 == "bf16"
    WEIGHTS, ABSMAX = weights, absmax

    @cuda.jit(device=True)
    def moments(g, m, v, beta1, beta2):
        """The new m and v of one element."""
        square = g * g
        return ffma(beta1, m - g, g), ffma(beta2, v - square, square)

    @cuda.jit(device=True)
    def step_to(p, m, v, rate, decay, epsilon, correction1, correction2):
        """The new master weight of one element."""
        direction = m * correction1 * rcp(sqrtf(v * correction2) + epsilon)
        return ffma(-rate, ffma(decay, p, direction), p)

    def adamw(
        p_, weights_, m_, v_, grad_, slot, scalars, norm, pieces, start,
        beta1, beta2, epsilon, decay, seed, tensor,
    ):  # fmt: skip
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        inside = i < pieces
        p = cuda.local.array((1, PW), dtype=types.uint32)
        m = cuda.local.array((1, MW), dtype=types.uint32)
        v = cuda.local.array((1, VW), dtype=types.uint32)
        g = cuda.local.array((1, GW), dtype=types.uint32)
        r = cuda.local.array((3, 4), dtype=types.uint32)  # random words of p, m, v
        load_g(g, 0, grad_ + i * GB, inside)  # all in flight before the first wait
        load_p(p, 0, p_ + i * PB, inside)
        load_m(m, 0, m_ + i * MB, inside)
        load_v(v, 0, v_ + i * VB, inside)
        finite = ldg32(norm + FINITE * 4) != NO_BITS  # the same for every thread
        if finite:
            clip = ldg32f(norm + CLIP * 4)
            rate = ldg32f(scalars + LEARNING_RATE * 4)
            correction1 = ldg32f(scalars + CORRECTION1 * 4)
            correction2 = ldg32f(scalars + CORRECTION2 * 4)
            step = ldg32(scalars + STEP * 4)
            if ROUND_P:
                r[0, 0], r[0, 1], r[0, 2], r[0, 3] = philox(seed, MASTER, start + i, tensor, step)
            if ROUND_M:
                r[1, 0], r[1, 1], r[1, 2], r[1, 3] = philox(seed, M, start + i, tensor, step)
            if ROUND_V:
                r[2, 0], r[2, 1], r[2, 2], r[2, 3] = philox(seed, V, start + i, tensor, step)
            for j in range(4):
                g0, g1 = low_g(g, 0, j) * clip, high_g(g, 0, j) * clip
                m0, v0 = moments(g0, low_m(m, 0, j), low_v(v, 0, j), beta1, beta2)
                m1, v1 = moments(g1, high_m(m, 0, j), high_v(v, 0, j), beta1, beta2)
                p0 = step_to(low_p(p, 0, j), m0, v0, rate, decay, epsilon, correction1, correction2)
                p1 = step_to(
                    high_p(p, 0, j), m1, v1, rate, decay, epsilon, correction1, correction2
                )
                set_m(m, 0, j, m0, m1, r[1, j])
                set_v(v, 0, j, v0, v1, r[2, j])
                set_p(p, 0, j, p0, p1, r[0, j])
        store_p(p_ + i * PB, p, 0, inside and finite)
        store_m(m_ + i * MB, m, 0, inside and finite)
        store_v(v_ + i * VB, v, 0, inside and finite)
        w = cuda.local.array((1, WW), dtype=types.uint32)
        running = NO_BITS
        for j in range(4):
            set_w(w, 0, j, low_p(p, 0, j), high_p(p, 0, j))
            if ABSMAX:
                running = track(running, w, 0, j)
        if WEIGHTS:
            store_w(weights_ + i * WB, w, 0, inside and finite)
        if ABSMAX:
            absmax_update(slot, running)  # of the old weights, if those stay

    return adamw


# ---- launch ------------------------------------------------------------------------------------
def adamw_launch(
    master: int, weights: int, m: int, v: int, grad: int, *, scalars: int, norm: int, n: int,
    start: int = 0, beta1: float, beta2: float, epsilon: float, weight_decay: float, seed: int,
    tensor: int, absmax: int = 0, master_dtype: str = "bf16", m_dtype: str = "fp32",
    v_dtype: str = "fp32", grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Update master, m, v (and weights, absmax unless 0) in place; all are device addresses."""
    k = kernel(
        make_adamw, SIGNATURE, threads=THREADS, options=OPTIONS, master=master_dtype,
        moment1=m_dtype, moment2=v_dtype, grad=grad_dtype, weights=bool(weights),
        absmax=bool(absmax),
    )  # fmt: skip
    pieces = n // PIECE
    k(
        stream, (cdiv(pieces, THREADS),), master, weights, m, v, grad, absmax, scalars, norm,
        pieces, start // PIECE, beta1, beta2, epsilon, weight_decay, seed, tensor,
    )  # fmt: skip


def scalars_of(*, learning_rate: float, beta1: float, beta2: float, step: int) -> np.ndarray:
    """The `scalars` words of optimizer step `step` (1 for the first), as float32 of the same
    bits."""
    words = np.empty(SCALARS, np.float32)
    words[LEARNING_RATE] = learning_rate
    words[CORRECTION1], words[CORRECTION2] = 1 / (1 - beta1**step), 1 / (1 - beta2**step)
    words.view(np.uint32)[STEP] = step & 0xFFFFFFFF
    return words


# ---- users -------------------------------------------------------------------------------------
def update(
    weights: Any, m: Any, v: Any, grad: Any, *, learning_rate: float, beta1: float = 0.9,
    beta2: float = 0.95, epsilon: float = 1e-8, weight_decay: float = 0.0, step: int, seed: int = 0,
    tensor: int = 0,
) -> None:  # fmt: skip
    """One AdamW step on GPU arrays of one shape, in place: weights, grad bfloat16; m, v float32.

    step counts from 1. The size must be a multiple of 8. tensor: any number that tells this weight
    from others, so that they share no random bits. ValueError on other shapes or dtypes.

    >>> adamw.update(weights, m, v, grad, learning_rate=3e-4, step=1)
    """
    a = describe(weights, dtype=DType.BF16, name="weights")
    if a.size % PIECE or step < 1:
        raise ValueError(f"weights has {a.size} elements, step is {step}: need a multiple of 8, 1")
    others = [
        describe(x, dtype=d, shape=a.shape, name=n).address
        for x, d, n in ((m, DType.FP32, "m"), (v, DType.FP32, "v"), (grad, DType.BF16, "grad"))
    ]
    words = scalars_of(learning_rate=learning_rate, beta1=beta1, beta2=beta2, step=step)
    norm = np.array([0.0, 1.0, 1.0], np.float32)  # no clipping, finite
    scalars, norms = upload_like(a, words), upload_like(a, norm)
    adamw_launch(
        a.address, 0, *others, scalars=describe(scalars, dtype=DType.FP32).address,
        norm=describe(norms, dtype=DType.FP32).address, n=a.size, beta1=beta1, beta2=beta2,
        epsilon=epsilon, weight_decay=weight_decay, seed=seed, tensor=tensor,
        stream=current_stream(a),
    )  # fmt: skip


# ---- cost --------------------------------------------------------------------------------------
def adamw_bytes(
    n: int, *, master: int = 2, m: int = 4, v: int = 4, grad: int = 2, weights: int = 0
) -> int:
    """Read and write master, m, v; read grad; write weights. Arguments: bytes an element."""
    return n * (2 * (master + m + v) + grad + weights)


# ---- reference ---------------------------------------------------------------------------------
def adamw_ref(
    p: np.ndarray, m: np.ndarray, v: np.ndarray, grad: np.ndarray, *, clip: float,
    learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float,
    step: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """float64 NumPy oracle, before any rounding to storage: (p, m, v)."""
    p64, m64, v64, g = (x.astype(np.float64) for x in (p, m, v, grad))
    g = g * clip
    m64 = beta1 * m64 + (1 - beta1) * g
    v64 = beta2 * v64 + (1 - beta2) * g**2
    direction = m64 / (1 - beta1**step) / (np.sqrt(v64 / (1 - beta2**step)) + epsilon)
    return p64 - learning_rate * (direction + weight_decay * p64), m64, v64


COMPILE_CASES = [
    CompileCase(
        make_adamw,
        {"master": p, "moment1": m, "moment2": v, "grad": g, "weights": w, "absmax": a},
        SIGNATURE,
        THREADS,
        options=OPTIONS,
    )
    for p, m, v, g, w, a in (
        ("bf16", "fp32", "fp32", "bf16", False, True),
        ("fp32", "fp32", "fp32", "bf16", True, True),
        ("bf16", "bf16", "bf16", "bf16", False, True),
        ("fp32", "bf16", "fp32", "fp32", True, False),
    )
]
