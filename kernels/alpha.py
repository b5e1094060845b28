r"""What a product of FP8 codes in bfloat16 is multiplied by, on the device.

    alpha = scale_a scale_b,  beta = 0 or 1

Shapes   out: two float32, [alpha, beta]; scale_a, scale_b: one float32 each.
Errors   One rounding.
Source   Emulation of FP8 units: DESIGN.md section 5.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import kernel
from llmq_nb.kernels.ptx import ldg32f, mul_rn, stg32f

THREADS = 32
SIGNATURE = (*(types.uint64,) * 3, types.float32)


def make_alpha():
    """One thread writes both."""

    def alpha(out, scale_a, scale_b, beta):
        if cuda.threadIdx.x == 0:
            stg32f(out, mul_rn(ldg32f(scale_a), ldg32f(scale_b)))
            stg32f(out + 4, beta)

    return alpha


def alpha_launch(out: int, scale_a: int, scale_b: int, *, beta: float, stream: Any) -> None:
    """Write alpha and beta; addresses of float32."""
    k = kernel(make_alpha, SIGNATURE, threads=THREADS)
    k(stream, (1,), out, scale_a, scale_b, beta)


def alpha_ref(scale_a: float, scale_b: float) -> np.float32:
    """float64, rounded once."""
    return np.float32(np.float64(scale_a) * np.float64(scale_b))


COMPILE_CASES = [CompileCase(make_alpha, {}, SIGNATURE, THREADS)]
