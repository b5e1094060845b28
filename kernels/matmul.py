r"""Matrix products through cuBLASLt: plans built once, called with raw addresses.

    forward          y[n, m]  = sum_k x[n, k] weight[m, k] + bias[m]
    data gradient    dx[n, k] = sum_m dy[n, m] weight[m, k]
    weight gradient  dweight[m, k] (+)= sum_n dy[n, m] x[n, k]

Shapes   x: (N, K), weight: (M, K), y: (N, M), row-major. cuBLASLt is column-major: a row-major
         (R, S) array is its S x R matrix, so every product below is written as out^T = second^T
         first^T.
Dtypes   bfloat16 or float32 operands (one kind), output bfloat16 or float32, sums in float32
         (CUBLAS_COMPUTE_32F: never TF32).
FP8      x and weight in e4m3, dy in e4m3 or e5m2, output bfloat16, times both tensors' scales. The
         library multiplies only what is contiguous along the summed dimension ("TN"), so the data
         gradient takes weight_t (K, M), and the weight gradient dy_t (M, N) and x_t (K, N): all
         multiples of 16 but the forward's and data gradient's N. A scale is a float32 on the device
         at a multiple of 16 bytes. `codes`: the same products of bfloat16 values of the codes, for
         cards without FP8 units; alpha = product of the scales, on the device.
Errors   K products summed in float32, then one rounding to the output. Adding to a BF16 output
         rounds twice: the library rounds the product before it adds (seen on an H200, cuBLASLt
         13.1).
Choice   Candidates are the heuristic's, in its order, then the same with their tiles handed to the
         blocks in the other order; products.py times them. Split-K sums that would depend on the
         order in which blocks finish are excluded (REDUCTION_SCHEME_MASK).

Source   cuBLAS library documentation, cublasLtMatmul.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from llmq_nb.core.dtype import DType

Kind = Literal["forward", "dgrad", "wgrad"]
COMPUTE_32F, R_32F = 68, 0
CUDA_TYPE = {DType.FP32: 0, DType.BF16: 14, DType.E4M3: 28, DType.E5M2: 29}
DEVICE_POINTERS = 1
"""Pointer mode: alpha and beta are read on the device."""
WORKSPACE_BYTES = 32 << 20
CANDIDATES = 8
"""Algorithms asked of the heuristic."""
FIXED_ORDER_SPLITS = 0b010
"""Reduction schemes: none, or partial sums in float32 in the workspace, added in a fixed order."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A product: N rows, M outputs, K inputs as in the docstring, whatever the kind."""

    kind: Kind
    N: int
    M: int
    K: int
    operand: DType
    out: DType
    bias: bool = False
    accumulate: bool = False
    codes: bool = False
    """BF16 operands are values of FP8 codes, in the layouts of FP8 products."""
    fast: bool = False
    """FP8: without the periodic promotion of the sums (precision.fast_accumulation)."""
    swiglu: bool = False
    """Forward: followed by SwiGLU of the output, see FusedProduct. Data gradient: by SwiGLU
    backward, see FusedGradient."""

    @property
    def timing_room(self) -> int:
        """Bytes of the largest of its matrices."""
        largest = max(self.N * self.M, self.N * self.K, self.M * self.K)
        return -(-largest * max(self.operand.itemsize, self.out.itemsize) // 256) * 256

    @property
    def timing_bytes(self) -> int:
        """Memory that timing it needs: a room for each of its matrices, two for twice its width."""
        rooms = {"forward": 4, "dgrad": 7}[self.kind] if self.swiglu else 3
        return rooms * self.timing_room

    @property
    def quantised(self) -> bool:
        """Whether operands are FP8 codes in some form."""
        return self.codes or self.operand.is_fp8

    @property
    def flops(self) -> int:
        """Multiplications and additions: the same for the three kinds."""
        return 2 * self.N * self.M * self.K

    def __str__(self) -> str:
        flags = ("bias", "accumulate", "codes", "fast", "swiglu")
        extras = "".join(f"+{flag}" for flag in flags if getattr(self, flag))
        return f"{self.kind} {self.N}x{self.M}x{self.K} {self.operand}->{self.out}{extras}"


@cache
def _lt() -> Any:
    """cuBLASLt's bindings. Imported on first use: the package needs a CUDA library."""
    from nvmath.bindings import cublasLt  # pyright: ignore

    return cublasLt


@cache
def _handle(device: int) -> int:
    """One library handle for each device; the device's context is current."""
    return _lt().create()


def library_version() -> int:
    """cuBLASLt's version, for example 130100."""
    return int(_lt().get_version())


class Product:
    """One shape's descriptors and algorithms on the current device."""

    def __init__(self, shape: Shape, *, device: int, algorithm: int = 0) -> None:
        lt = _lt()
        self.shape, self._matmul, self._handle = shape, lt.matmul, _handle(device)
        s, attributes = shape, lt.MatmulDescAttribute
        # (rows, columns, leading dimension) as stored, column-major, and whether transposed
        weight, x, y = (s.K, s.M, s.K), (s.K, s.N, s.K), (s.M, s.N, s.M)
        first, second, out, trans = {
            "forward": (weight, x, y, (1, 0)),
            "dgrad": (weight, y, x, (0, 0)),
            "wgrad": (x, y, weight, (0, 1)),
        }[s.kind]
        if s.quantised:
            weight_t, x_t, y_t = ((c, r, c) for r, c, _ in (weight, x, y))
            first, second = {
                "forward": (weight, x), "dgrad": (weight_t, y), "wgrad": (x_t, y_t),
            }[s.kind]  # fmt: skip
            trans = (1, 0)
        self._descriptor = lt.matmul_desc_create(COMPUTE_32F, R_32F)
        self._set(attributes.TRANSA, trans[0])
        self._set(attributes.TRANSB, trans[1])
        if s.bias:
            self._set(attributes.EPILOGUE, int(lt.Epilogue.BIAS))
            self._set(attributes.BIAS_DATA_TYPE, CUDA_TYPE[s.out])
        if s.fast:
            self._set(attributes.FAST_ACCUM, 1)
        if s.codes:
            self._set(attributes.POINTER_MODE, DEVICE_POINTERS)
        self._scales = (attributes.B_SCALE_POINTER, attributes.A_SCALE_POINTER)
        result = CUDA_TYPE[s.out]
        weight_or_x = DType.E4M3 if s.operand.is_fp8 else s.operand
        self._a = lt.matrix_layout_create(CUDA_TYPE[weight_or_x], *first)
        self._b = lt.matrix_layout_create(CUDA_TYPE[s.operand], *second)
        self._c = lt.matrix_layout_create(result, *out)
        self._scalars = np.array([1.0, float(s.accumulate)], np.float32)
        self._alpha = self._scalars.ctypes.data
        self._beta = self._alpha + 4
        self._bias_attribute = attributes.BIAS_POINTER
        found = self._heuristic()
        self._found = np.concatenate([found, *self._other_orders(found)])
        self.count = len(self._found)
        self.choose(algorithm)

    def choose(self, algorithm: int) -> None:
        """Use the candidate of that index."""
        if not 0 <= algorithm < self.count:
            raise ValueError(f"{self.shape}: algorithm {algorithm} of {self.count}")
        self.algorithm = algorithm
        self._pointer = self._found.ctypes.data + algorithm * self._found.dtype.itemsize

    def __call__(
        self, out: int, x: int, y: int, *, workspace: int, stream: int, bias: int = 0,
        scales: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Launch. out, x, y: addresses of the result and the two operands, in the order of the
        equations: forward (x, weight), dgrad (dy, weight), wgrad (dy, x). scales: of both operands
        in that order; or with `codes` one address of the product of both, with beta behind it."""
        if bias:
            self._set(self._bias_attribute, bias)
        alpha, beta = self._alpha, self._beta
        if self.shape.codes:
            (alpha,) = scales
            beta = alpha + 4
        else:
            for attribute, scale in zip(self._scales, scales, strict=False):
                self._set(attribute, scale)
        a, b = y, x
        self._matmul(
            self._handle, self._descriptor, alpha, a, self._a, b, self._b, beta,
            out, self._c, out, self._c, self._pointer, workspace, WORKSPACE_BYTES, stream,
        )  # fmt: skip

    def _set(self, attribute: Any, value: int) -> None:
        lt = _lt()
        kind = np.dtype(lt.get_matmul_desc_attribute_dtype(attribute))
        held = np.array([value], kind)
        lt.matmul_desc_set_attribute(self._descriptor, attribute, held.ctypes.data, held.nbytes)

    def _heuristic(self) -> Any:
        """The library's candidates, its favourite first."""
        lt = _lt()
        preference = lt.matmul_preference_create()
        names = lt.MatmulPreferenceAttribute
        for name, value, kind in (
            (names.MAX_WORKSPACE_BYTES, WORKSPACE_BYTES, np.uint64),
            (names.REDUCTION_SCHEME_MASK, FIXED_ORDER_SPLITS, np.uint32),
        ):
            held = np.array([value], kind)
            lt.matmul_preference_set_attribute(preference, name, held.ctypes.data, held.nbytes)
        found = np.zeros(CANDIDATES, lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        if self.shape.bias:
            self._set(self._bias_attribute, 256)  # any aligned address: alignment is asked about
        if self.shape.operand.is_fp8:
            for attribute in self._scales:
                self._set(attribute, 256)
        lt.matmul_algo_get_heuristic(
            self._handle, self._descriptor, self._a, self._b, self._c, self._c, preference,
            CANDIDATES, found.ctypes.data, count.ctypes.data,
        )  # fmt: skip
        lt.matmul_preference_destroy(preference)
        if count[0] == 0:
            raise RuntimeError(f"cuBLASLt has no algorithm for {self.shape}")
        return found[: count[0]]

    def _other_orders(self, found: Any) -> list[Any]:
        """The candidates with the other order of tiles, where the library has them."""
        lt = _lt()
        order = lt.MatmulAlgoConfigAttribute.CTA_SWIZZLING
        value, size, others = np.zeros(1, np.uint32), np.zeros(1, np.uint64), []
        for i in range(len(found)):
            other, checked = found[i : i + 1].copy(), np.zeros(1, found.dtype)
            algorithm = other.ctypes.data
            buffer = value.ctypes.data, value.nbytes
            try:
                lt.matmul_algo_config_get_attribute(algorithm, order, *buffer, size.ctypes.data)
                value ^= 1
                lt.matmul_algo_config_set_attribute(algorithm, order, *buffer)
                lt.matmul_algo_check(
                    self._handle, self._descriptor, self._a, self._b, self._c, self._c, algorithm,
                    checked.ctypes.data,
                )  # fmt: skip
            except lt.cuBLASLtError:
                continue
            if checked["workspace_size"][0] <= WORKSPACE_BYTES:
                others.append(other)
        return others


def matmul_ref(kind: Kind, first: Any, second: Any, *, bias: Any = None, before: Any = None) -> Any:
    """float64 NumPy oracle: the equations; before: what the result is added to."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    out = {"forward": lambda: a @ b.T, "dgrad": lambda: a @ b, "wgrad": lambda: a.T @ b}[kind]()
    if bias is not None:
        out = out + bias.astype(np.float64)
    return out if before is None else out + before.astype(np.float64)
