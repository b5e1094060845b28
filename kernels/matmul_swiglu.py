r"""The gate+up product with SwiGLU and absmax in its epilogue, on sm_90.

    gate_up[n, m] = sum_k x[n, k] weight[m, k]                    rounded to bfloat16
    act[n, f]     = swiglu of the rounded gate_up[n, f], gate_up[n, F + f]
    absmax        = max |act|                                     (optional; of the rounded values)

Shapes   x: (N, K), weight: (2 F, K) as [gate; up], gate_up: (N, 2 F), act: (N, F), row-major. Any
         N; F and K multiples of 16.
Dtypes   x, weight: bfloat16, or e4m3 times both tensors' scales (float32 on the device). gate_up,
         act: bfloat16. absmax: float32, 0 or an earlier maximum before.
Errors   As a product of matmul.py. K products are summed in the order of k, so a repeat has the
         same bits whatever the grid; e4m3 with `fast` keeps the tensor core's sums (13 bits or
         more), without it they are promoted to float32 every 128 products. act has the bits that
         swiglu.py makes of gate_up.
Cost     gate_up is not read again: N F 4 bytes less than the product and swiglu.py.
Source   Shazeer 2020, arXiv:2002.05202, eq. 5; kernel: matmul_swiglu_hopper.py.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.attention_hopper_tiles import CC, persistent_grid
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, is_preparing, kernel
from llmq_nb.kernels.matmul_swiglu_hopper import OPTIONS, SIGNATURE, make_matmul_swiglu
from llmq_nb.kernels.matmul_swiglu_tiles import (
    ACT_COLUMNS,
    CLUSTER,
    ROWS,
    SHARED_BYTES,
    STEP_BYTES,
    THREADS,
)
from llmq_nb.kernels.swiglu import swiglu_forward_launch, swiglu_forward_ref
from llmq_nb.kernels.tensor_map import tensor_map

if TYPE_CHECKING:
    from llmq_nb.kernels.matmul import Product, Shape

GROUPS = (8, 16)
"""Row tiles whose operands stay in the L2 cache together: the candidates."""
CHUNK = 16
"""F and K are multiples of this."""


def has_kernel(cc: tuple[int, int], shape: "Shape") -> bool:
    """Whether a GPU of this compute capability computes this product with SwiGLU in one kernel."""
    formats = (DType.BF16, DType.E4M3)
    fits = shape.K % CHUNK == 0 and shape.M % (2 * CHUNK) == 0
    return (
        cc == CC and fits and shape.operand in formats and shape.out is DType.BF16
        and not (shape.codes or shape.bias)
    )  # fmt: skip


# ---- launch ------------------------------------------------------------------------------------
def matmul_swiglu_launch(
    act: int, gate_up: int, x: int, weight: int, *, rows: int, F: int, K: int,
    dtype: DType = DType.BF16, fast: bool = True, scales: tuple[int, ...] = (), absmax: int = 0,
    group: int = GROUPS[0], stream: Any,
) -> None:  # fmt: skip
    """Write gate_up (rows, 2 F) and, unless its address is 0, act (rows, F); raise absmax unless 0.

    dtype: of x and weight; e4m3: with the addresses of their scales.
    """
    launch = kernel(
        make_matmul_swiglu, SIGNATURE, THREADS, SHARED_BYTES, OPTIONS, kind=str(dtype),
        promote=dtype.is_fp8 and not fast, forward=True, act=bool(act), absmax=bool(absmax),
    )  # fmt: skip
    step, row_bytes = STEP_BYTES // dtype.itemsize, K * dtype.itemsize
    x_map = tensor_map(x, (K, rows), (row_bytes,), (step, ROWS), dtype)
    share = (step, ACT_COLUMNS // CLUSTER, 2)  # as many gate as up rows
    weight_map = tensor_map(weight, (K, F, 2), (row_bytes, F * row_bytes), share, dtype)
    gate_up_map = tensor_map(gate_up, (F, 2, rows), (2 * F, 4 * F), (64, 1, 16))
    row_tiles, column_tiles = cdiv(rows, CLUSTER * ROWS), cdiv(F, ACT_COLUMNS)
    blocks = persistent_grid(row_tiles * column_tiles * CLUSTER) // CLUSTER * CLUSTER
    launch(
        stream, (blocks,), gate_up_map, act, 0, absmax, x_map, weight_map, *(scales or (0, 0)),
        rows, F, row_tiles, column_tiles, cdiv(K, step), group,
    )  # fmt: skip


class Fused:
    """A product and what comes behind it: candidate 0 is the library's product and swiglu.py, the
    others are one kernel."""

    def __init__(self, shape: "Shape", plain: "Product", *, algorithm: int = 0) -> None:
        """plain: the product alone, with its algorithm."""
        self.shape, self.plain, self.count = shape, plain, 1 + len(GROUPS)
        self.choose(algorithm)

    def choose(self, algorithm: int) -> None:
        """Use the candidate of that index."""
        if not 0 <= algorithm < self.count:
            raise ValueError(f"{self.shape}: algorithm {algorithm} of {self.count}")
        self.algorithm = algorithm
        self.group = GROUPS[max(algorithm - 1, 0)]


class FusedProduct(Fused):
    """A forward product whose output goes through SwiGLU."""

    def __call__(
        self, out: int, x: int, y: int, *, workspace: int, stream: int,
        scales: tuple[int, ...] = (), act: int = 0, absmax: int = 0,
    ) -> None:  # fmt: skip
        """Launch. out: gate_up; x, y: x and weight; act: 0 if only gate_up is wanted."""
        s, F = self.shape, self.shape.M // 2
        preparing = is_preparing()  # then all that a later choice launches is loaded
        if self.algorithm or preparing:
            matmul_swiglu_launch(
                act, out, x, y, rows=s.N, F=F, K=s.K, dtype=s.operand, fast=s.fast, scales=scales,
                absmax=absmax if act else 0, group=self.group, stream=stream,
            )  # fmt: skip
        if self.algorithm and not preparing:
            return
        if not preparing:
            self.plain(out, x, y, workspace=workspace, stream=stream, scales=scales)
        if act:
            swiglu_forward_launch(act, out, rows=s.N, F=F, absmax=absmax, stream=stream)


# ---- cost, reference ---------------------------------------------------------------------------
def matmul_swiglu_bytes(N: int, F: int, K: int, *, itemsize: int) -> int:
    """Read x and weight, write bfloat16 gate_up and act."""
    return (N * K + 2 * F * K) * itemsize + 6 * N * F


def matmul_swiglu_ref(
    x: np.ndarray, weight: np.ndarray, *, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """float64 NumPy oracle: (gate_up, act), neither rounded."""
    gate_up = scale * (x.astype(np.float64) @ weight.astype(np.float64).T)
    return gate_up, swiglu_forward_ref(gate_up)


COMPILE_CASES = [
    CompileCase(
        make_matmul_swiglu,
        {"kind": kind, "promote": promote, "forward": True, "act": act, "absmax": absmax},
        SIGNATURE, THREADS, SHARED_BYTES, OPTIONS, only_cc=CC,
    )
    for kind, promote, act, absmax in (
        ("bf16", False, True, False),
        ("bf16", False, False, False),
        ("e4m3", False, True, True),
        ("e4m3", True, True, True),
        ("e4m3", True, False, False),
    )
]  # fmt: skip
