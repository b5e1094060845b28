"""What both engines pass around: a named buffer with a shape, a format and a place.

`data` is a NumPy array on the cpu engine and a device address (an int) on the cuda engine; nothing
in model/ looks inside. A tensor that feeds an FP8 product carries an `Fp8Slot`: its producer leaves
the absmax there, the product quantises with it, and a recomputed tensor is requantised with the
same absmax.
"""

import dataclasses
import math
from typing import Any

from llmq_nb.core.dtype import DType


@dataclasses.dataclass(slots=True, eq=False)
class Fp8Slot:
    """How a tensor enters FP8 products.

    format: e4m3 or e5m2. absmax, scale: one float32 each (array of 1 or address). counts: two
    uint32, elements underflowed and saturated (train/health.py). codes, codes_t: where the
    quantised tensor and its transpose go; None: the engine makes them on the fly. kept: they hold
    from where the engine writes them (a weight's update, an input's forward product) to where it
    reads them; else they are scratch. made_again: recomputation leaves codes_t. derived: only codes
    are kept, and codes_t is scratch that they are transposed into where it is read. shared: the
    absmax is that of all ranks' shards, so who quantises one shard reads it and does not find it.
    """

    format: DType
    absmax: Any
    scale: Any = None
    counts: Any = None
    codes: "Tensor | None" = None
    codes_t: "Tensor | None" = None
    kept: bool = False
    made_again: bool = False
    derived: bool = False
    shared: bool = False

    @property
    def forward_only(self) -> bool:
        """Whether an input's values are gone in backward. Its product is not computed again then;
        others' may be, so they are counted in backward, once."""
        return self.kept or self.made_again


@dataclasses.dataclass(slots=True, eq=False)
class Tensor:
    """A contiguous row-major buffer. name: unique in a run. fp8: set if it feeds FP8 products.

    host: it lies in pinned host memory, where the device reads and writes it by the same address.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    data: Any
    fp8: Fp8Slot | None = None
    host: bool = False

    @property
    def address(self) -> int:
        """Of the first byte, for copies."""
        return self.data if isinstance(self.data, int) else self.data.ctypes.data

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data, without the FP8 slot's."""
        return self.size * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> "Tensor":
        """Rows start .. stop - 1 of the first axis, sharing the memory; no FP8 slot."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"rows {start}:{stop} of {self.name} {self.shape}")
        if isinstance(self.data, int):
            row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
            data: Any = self.data + start * row_bytes
        else:
            data = self.data[start:stop]
        return Tensor(self.name, (stop - start, *self.shape[1:]), self.dtype, data, host=self.host)

    def view(self, *shape: int) -> "Tensor":
        """The same memory under another shape; no FP8 slot."""
        if math.prod(shape) != self.size:
            raise ValueError(f"{self.name} {self.shape} has not the size of {shape}")
        data = self.data if isinstance(self.data, int) else self.data.reshape(shape)
        return Tensor(self.name, shape, self.dtype, data, host=self.host)
