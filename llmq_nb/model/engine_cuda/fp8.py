"""FP8 products on one GPU: quantise the operands in the layouts that they need, then multiply.

    forward          codes of x (N, K), codes of weight (M, K)
    data gradient    codes of dy (N, M), transposed codes of weight (K, M)
    weight gradient  transposed codes of dy (M, N) and of x (K, N), N padded to 16 by zeros

A tensor is read once for both layouts. On a card without FP8 units (`fp8_units = "emulate"`) the
codes are the same and cuBLASLt multiplies their BF16 values.
"""

from llmq_nb.config import Config
from llmq_nb.core.dtype import DType
from llmq_nb.core.tensor import Fp8Slot, Tensor
from llmq_nb.kernels.alpha import alpha_launch
from llmq_nb.kernels.elementwise import absmax_launch, clear_launch
from llmq_nb.kernels.fp8_health import fp8_health_launch
from llmq_nb.kernels.matmul import Kind, Shape
from llmq_nb.kernels.products import Products
from llmq_nb.kernels.quantize import decode_launch, quantize_launch, quantize_transpose_launch
from llmq_nb.kernels.swiglu import swiglu_quantize_launch
from llmq_nb.kernels.transpose_bytes import transpose_bytes_launch
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.fp8 import SLOT_WORDS, fp8_weights, padded_rows

SLOT_BYTES = 4 * SLOT_WORDS


class Fp8Products:
    """The FP8 products of one rank.

    measures_weights: nobody else keeps the absmax of the weights, so each use finds it.
    """

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        tensors: dict[str, Tensor],
        products: Products,
        *,
        stream: int,
        measures_weights: bool,
    ) -> None:
        self.products, self.stream, self.measures_weights = products, stream, measures_weights
        self.hardware = config.precision.fp8_units != "emulate"
        self.fast = config.precision.fast_accumulation and self.hardware
        self.counts_health = False
        """Whether products count what the codes of their operands lose."""
        self.rows = padded_rows(config)
        self._decoded, self._alpha = tensors.get("fp8/decoded"), tensors.get("fp8/alpha")
        slots = tensors.get("fp8/slots")
        weights = len(fp8_weights(config, model))
        self._weights = slots.rows(0, weights) if slots else None
        self._others = slots.rows(weights, slots.shape[0]) if slots else None

    def clear(self, *, weights: bool) -> None:
        """Zero the slots of the weights, or of all else."""
        slots = self._weights if weights else self._others
        if slots is not None:
            clear_launch(slots.data, nbytes=slots.nbytes, stream=self.stream)

    def measure(self, tensor: Tensor) -> None:
        """Raise the absmax of a tensor whose producer does not."""
        if tensor.fp8 is not None:
            absmax_launch(tensor.fp8.absmax, tensor.data, n=tensor.size, stream=self.stream)

    def update_weight(self, weight: Tensor) -> None:
        """Write the kept codes of a weight whose absmax was just found."""
        if weight.fp8 is not None and weight.fp8.kept:
            self._quantize(weight, row_major=True, transposed=not weight.fp8.derived)

    def swiglu_codes(self, y: Tensor, gate_up: Tensor) -> None:
        """The transposed codes of a SwiGLU whose absmax forward found; not its values."""
        slot = _slot(y)
        swiglu_quantize_launch(
            0, _data(slot.codes_t), slot.scale, gate_up.data, slot.absmax, rows=y.shape[0],
            F=y.shape[1], format=str(slot.format), hardware=self.hardware, stream=self.stream,
        )  # fmt: skip

    def count_health(self, tensor: Tensor) -> None:
        """Add what the codes of a tensor lose to its slot's counts; its absmax is known."""
        slot = _slot(tensor)
        fp8_health_launch(
            slot.counts, tensor.data, slot.absmax, n=tensor.size, format=str(slot.format),
            stream=self.stream,
        )  # fmt: skip

    def linear(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """y = x weight^T + bias."""
        operands, _ = self.forward_operands(x, weight)
        shape = self.forward_shape(x.shape[0], weight, y, bias=bias is not None)
        address = bias.data if bias is not None else 0
        self._product(shape, y, _slot(x), _slot(weight), *operands, bias=address)

    def forward_shape(self, rows: int, weight: Tensor, y: Tensor, **options: bool) -> Shape:
        """The product of `linear`. options: of Shape."""
        M, K = weight.shape
        return self._shape("forward", rows, M, K, DType.E4M3, y.dtype, **options)

    def forward_operands(
        self, x: Tensor, weight: Tensor
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Make the codes of x and weight; addresses of both, and of their scales."""
        a, b = _slot(x), _slot(weight)
        if self.counts_health and a.forward_only:
            self.count_health(x)
        self._quantize(x, row_major=True, transposed=a.kept)
        self._weight(weight, transposed=False)
        return (_data(a.codes), _data(b.codes)), (a.scale, b.scale)

    def linear_backward(
        self,
        dx: Tensor,
        dweight: Tensor,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """dweight (+)= dy^T x; dx = dy weight."""
        self.weight_gradient(dweight, dy, x, weight, accumulate=accumulate)
        operands, _ = self.data_gradient_operands(dy, weight)
        shape = self.data_gradient_shape(x.shape[0], weight, dy, dx)
        self._product(shape, dx, _slot(dy), _slot(weight), *operands)

    def weight_gradient(
        self, dweight: Tensor, dy: Tensor, x: Tensor, weight: Tensor, *, accumulate: bool
    ) -> None:
        """dweight (+)= dy^T x; makes the codes of dy in both layouts."""
        M, K = weight.shape
        d, a = _slot(dy), _slot(x)
        if self.counts_health:
            self.count_health(dy)
            if not a.forward_only:
                self.count_health(x)
        self._quantize(dy, row_major=True, transposed=True)
        if not (a.kept or a.made_again):
            self._quantize(x, row_major=False, transposed=True)
        shape = self._shape(
            "wgrad", self.rows, M, K, d.format, dweight.dtype, accumulate=accumulate
        )
        self._product(shape, dweight, d, a, _data(d.codes_t), _data(a.codes_t))

    def data_gradient_shape(
        self, rows: int, weight: Tensor, dy: Tensor, dx: Tensor, **options: bool
    ) -> Shape:
        """The product dx = dy weight. options: of Shape."""
        M, K = weight.shape
        return self._shape("dgrad", rows, M, K, _slot(dy).format, dx.dtype, **options)

    def data_gradient_operands(
        self, dy: Tensor, weight: Tensor
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Make the transposed codes of weight; addresses of both operands, and of their scales. The
        codes of dy are there."""
        d, b = _slot(dy), _slot(weight)
        self._weight(weight, transposed=True)
        return (_data(d.codes), _data(b.codes_t)), (d.scale, b.scale)

    def _weight(self, weight: Tensor, *, transposed: bool) -> None:
        """A weight's codes in one layout, unless they are kept."""
        slot = _slot(weight)
        if slot.kept:
            if slot.derived and transposed:
                transpose_bytes_launch(
                    _data(slot.codes_t), _data(slot.codes), R=weight.shape[0], C=weight.shape[1],
                    stream=self.stream,
                )  # fmt: skip
            return
        if self.measures_weights:
            clear_launch(slot.scale, nbytes=SLOT_BYTES, stream=self.stream)
            self.measure(weight)
        self._quantize(weight, row_major=not transposed, transposed=transposed)

    def _quantize(self, tensor: Tensor, *, row_major: bool, transposed: bool) -> None:
        slot = _slot(tensor)
        R, C = tensor.shape
        common = {"format": str(slot.format), "hardware": self.hardware, "stream": self.stream}
        if transposed:
            quantize_transpose_launch(
                _data(slot.codes) if row_major else 0, _data(slot.codes_t), slot.scale, tensor.data,
                slot.absmax, R=R, C=C, **common,
            )  # fmt: skip
        else:
            quantize_launch(
                _data(slot.codes), slot.scale, tensor.data, slot.absmax, n=tensor.size, **common
            )

    def _shape(
        self, kind: Kind, N: int, M: int, K: int, operand: DType, out: DType, **options: bool
    ) -> Shape:
        if self.hardware:
            return Shape(kind, N, M, K, operand, out, fast=self.fast, **options)
        return Shape(kind, N, M, K, DType.BF16, out, codes=True, **options)

    def _product(
        self, shape: Shape, out: Tensor, a: Fp8Slot, b: Fp8Slot, first: int, second: int,
        *, bias: int = 0,
    ) -> None:  # fmt: skip
        scales = (a.scale, b.scale)
        if not self.hardware:
            assert self._decoded is not None and self._alpha is not None
            sizes = _sizes(shape)
            places = (self._decoded.data, self._decoded.rows(1, 2).data)
            for place, codes, n, slot in zip(places, (first, second), sizes, (a, b), strict=True):
                decode_launch(place, codes, n=n, format=str(slot.format), stream=self.stream)
            alpha_launch(
                self._alpha.data, a.scale, b.scale, beta=float(shape.accumulate), stream=self.stream
            )
            (first, second), scales = places, (self._alpha.data,)
        self.products(shape, out.data, first, second, stream=self.stream, bias=bias, scales=scales)


def _sizes(s: Shape) -> tuple[int, int]:
    """Elements of a product's two operands."""
    return {
        "forward": (s.N * s.K, s.M * s.K),
        "dgrad": (s.N * s.M, s.M * s.K),
        "wgrad": (s.N * s.M, s.N * s.K),
    }[s.kind]


def _slot(tensor: Tensor) -> Fp8Slot:
    assert tensor.fp8 is not None, f"{tensor.name} feeds an FP8 product and has no FP8 slot"
    return tensor.fp8


def _data(tensor: Tensor | None) -> int:
    assert tensor is not None, "an FP8 slot without room for codes"
    return tensor.data
