r"""The down projection's data gradient with SwiGLU backward and absmax behind it, on sm_90.

    dact[n, f]              = sum_c dy[n, c] weight[c, f]          rounded to bfloat16
    dgate[n, f], dup[n, f]  = swiglu backward of the rounded dact[n, f], with gate[n, f], up[n, f]
    absmax                  = max |dgate|, |dup|         (optional; of the rounded values)

Shapes   dy: (N, C), weight: (C, F), or e4m3: its transposed codes (F, C); gate_up, dgate_up:
         (N, 2 F) as [gate; up], row-major. Any N; F and C multiples of 16.
Dtypes   dy, weight: bfloat16, or e4m3 times both tensors' scales (float32 on the device). gate_up,
         dgate_up: bfloat16. absmax: float32, 0 or an earlier maximum before.
Errors   As a product of matmul.py, then as swiglu.py. C products are summed in the order of k, so a
         repeat has the same bits whatever the grid; e4m3 with `fast` keeps the tensor core's sums
         (13 bits or more), without it they are promoted to float32 every 128 products.
Cost     dact is neither written nor read: N F 4 bytes less than the product and swiglu.py.
Source   Shazeer 2020, arXiv:2002.05202, eq. 5; kernel: matmul_swiglu_hopper.py.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.attention_hopper_tiles import CC, persistent_grid
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, is_preparing, kernel
from llmq_nb.kernels.matmul_swiglu import CHUNK, GROUPS, Fused
from llmq_nb.kernels.matmul_swiglu_hopper import OPTIONS, SIGNATURE, make_matmul_swiglu
from llmq_nb.kernels.matmul_swiglu_tiles import (
    CLUSTER,
    COLUMNS,
    ROWS,
    SHARED_BYTES,
    STEP_BYTES,
    THREADS,
)
from llmq_nb.kernels.swiglu import swiglu_backward_launch, swiglu_backward_ref
from llmq_nb.kernels.tensor_map import tensor_map

if TYPE_CHECKING:
    from llmq_nb.kernels.matmul import Shape


def has_backward_kernel(cc: tuple[int, int], shape: "Shape") -> bool:
    """Whether a GPU of this compute capability computes this data gradient and SwiGLU backward in
    one kernel."""
    formats = (DType.BF16, DType.E4M3)
    fits = shape.K % CHUNK == 0 and shape.M % CHUNK == 0
    return (
        cc == CC and fits and shape.operand in formats and shape.out is DType.BF16
        and not shape.codes
    )  # fmt: skip


# ---- launch ------------------------------------------------------------------------------------
def matmul_swiglu_backward_launch(
    dgate_up: int, dy: int, weight: int, gate_up: int, *, rows: int, F: int, C: int,
    dtype: DType = DType.BF16, fast: bool = True, scales: tuple[int, ...] = (), absmax: int = 0,
    group: int = GROUPS[0], stream: Any,
) -> None:  # fmt: skip
    """Write dgate_up (rows, 2 F) from dy (rows, C), weight and gate_up; raise absmax unless 0.

    weight: (C, F) bfloat16, or its transposed codes (F, C). scales: addresses, of dy and weight.
    """
    launch = kernel(
        make_matmul_swiglu, SIGNATURE, THREADS, SHARED_BYTES, OPTIONS, kind=str(dtype),
        promote=dtype.is_fp8 and not fast, forward=False, act=False, absmax=bool(absmax),
    )  # fmt: skip
    step, row_bytes = STEP_BYTES // dtype.itemsize, C * dtype.itemsize
    dy_map = tensor_map(dy, (C, rows), (row_bytes,), (step, ROWS), dtype)
    if dtype.is_fp8:
        weight_map = tensor_map(weight, (C, F), (row_bytes,), (step, COLUMNS // CLUSTER), dtype)
    else:
        weight_map = tensor_map(weight, (F, C), (2 * F,), (64, step))
    row_tiles, column_tiles = cdiv(rows, CLUSTER * ROWS), cdiv(F, COLUMNS)
    blocks = persistent_grid(row_tiles * column_tiles * CLUSTER) // CLUSTER * CLUSTER
    launch(
        stream, (blocks,), 0, dgate_up, gate_up, absmax, dy_map, weight_map, *(scales or (0, 0)),
        rows, F, row_tiles, column_tiles, cdiv(C, step), group,
    )  # fmt: skip


class FusedGradient(Fused):
    """A data gradient that goes through SwiGLU backward."""

    def __call__(
        self, out: int, x: int, y: int, *, gate_up: int, dact: int, workspace: int, stream: int,
        scales: tuple[int, ...] = (), absmax: int = 0,
    ) -> None:  # fmt: skip
        """Launch. out: dgate_up; x, y: dy and weight; dact: room for the data gradient."""
        s = self.shape
        preparing = is_preparing()  # then all that a later choice launches is loaded
        if self.algorithm or preparing:
            matmul_swiglu_backward_launch(
                out, x, y, gate_up, rows=s.N, F=s.K, C=s.M, dtype=s.operand, fast=s.fast,
                scales=scales, absmax=absmax, group=self.group, stream=stream,
            )  # fmt: skip
        if self.algorithm and not preparing:
            return
        if not preparing:
            self.plain(dact, x, y, workspace=workspace, stream=stream, scales=scales)
        swiglu_backward_launch(out, dact, gate_up, rows=s.N, F=s.K, absmax=absmax, stream=stream)


# ---- cost, reference ---------------------------------------------------------------------------
def matmul_swiglu_backward_bytes(N: int, F: int, C: int, *, itemsize: int) -> int:
    """Read dy, weight and bfloat16 gate_up, write bfloat16 dgate_up."""
    return (N * C + F * C) * itemsize + 8 * N * F


def matmul_swiglu_backward_ref(
    dy: np.ndarray, weight: np.ndarray, gate_up: np.ndarray, *, scale: float = 1.0
) -> np.ndarray:
    """float64 NumPy oracle: dgate_up, with dact not rounded; weight: (C, F)."""
    dact = scale * (dy.astype(np.float64) @ weight.astype(np.float64))
    return swiglu_backward_ref(dact, gate_up)


COMPILE_CASES = [
    CompileCase(
        make_matmul_swiglu,
        {"kind": kind, "promote": promote, "forward": False, "act": False, "absmax": absmax},
        SIGNATURE, THREADS, SHARED_BYTES, OPTIONS, only_cc=CC,
    )
    for kind, promote, absmax in (
        ("bf16", False, False), ("e4m3", False, True), ("e4m3", True, True)
    )
]  # fmt: skip
