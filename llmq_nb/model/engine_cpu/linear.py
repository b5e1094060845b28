"""Products, SwiGLU and the embedding, forward and backward, on NumPy arrays.

An FP8 product multiplies the codes and then both scales: the codes are exact in float32, so the
only roundings are the float32 sums and the output's, as on the GPU.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.dtype import FP8_MAX
from llmq_nb.core.rounding import absmax, quantize, scales, to_float32
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.engine_cpu.rows import accumulated, each_rows, product

Array = NDArray[Any]
Float = NDArray[np.float32]


def operand(tensor: Tensor, *, fp8: bool) -> tuple[Float, np.float32]:
    """(values, scale) of a product's input: its codes and scale in FP8, else itself and 1."""
    if not fp8:
        return to_float32(tensor.data), np.float32(1.0)
    assert tensor.fp8 is not None, f"{tensor.name} feeds an FP8 product and has no FP8 slot"
    tensor.fp8.absmax[0] = absmax(tensor.data)
    codes, scale = quantize(tensor.data, tensor.fp8.format, tensor.fp8.absmax[0])
    if tensor.fp8.kept and tensor.fp8.codes_t is not None:
        tensor.fp8.codes_t.data[:, : codes.shape[0]] = codes.T
    return codes.astype(np.float32), scale


def find_absmax(weight: Tensor) -> None:
    """Into its slot, if it has one."""
    if weight.fp8 is not None:
        weight.fp8.absmax[0] = absmax(weight.data)


def keep_codes(weight: Tensor) -> None:
    """Write the codes of a weight that keeps them."""
    slot = weight.fp8
    if slot is not None and slot.kept and slot.codes is not None:
        if not slot.shared:
            find_absmax(weight)
        codes = quantize(weight.data, slot.format, slot.absmax[0])[0]
        slot.codes.data.reshape(-1)[: codes.size] = codes.reshape(-1)


def weight_operand(weight: Tensor) -> tuple[Float, np.float32]:
    """`operand` of a weight: its codes where they are kept."""
    slot = weight.fp8
    if slot is None or not slot.kept or slot.codes is None:
        return operand(weight, fp8=slot is not None)
    return slot.codes.data.astype(np.float32), scales(slot.absmax[0], slot.format)[0]


def kept_operand(tensor: Tensor, *, fp8: bool) -> tuple[Float, np.float32]:
    """`operand` of an input in backward: where forward kept the codes, its values are gone."""
    slot = tensor.fp8
    if not fp8 or slot is None or not slot.kept or slot.codes_t is None:
        return operand(tensor, fp8=fp8)
    codes = slot.codes_t.data[:, : tensor.shape[0]].T
    return codes.astype(np.float32), scales(slot.absmax[0], slot.format)[0]


def count_health(tensor: Tensor) -> None:
    """Absmax and counts of what the codes of an FP8 product's operand lose, into its slot."""
    slot = tensor.fp8
    if slot is None:
        return
    slot.absmax[0] = absmax(tensor.data)
    codes, _ = quantize(tensor.data, slot.format, slot.absmax[0])
    magnitudes = np.abs(codes.astype(np.float32))
    underflowed = np.count_nonzero((magnitudes == 0) & (tensor.data != 0))
    saturated = np.count_nonzero(magnitudes == FP8_MAX[slot.format])
    slot.counts.view(np.uint32)[:] = (underflowed, saturated)


def linear(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """y = x weight^T + bias, as `Ops.linear` says; codes of x and weight if weight has a slot."""
    fp8 = weight.fp8 is not None
    xs, x_scale = operand(x, fp8=fp8)
    ws, w_scale = weight_operand(weight)
    shift = None if bias is None else to_float32(bias.data)
    product(y.data, xs, ws.T, scale=x_scale * w_scale, bias=shift)


def linear_backward(
    dx: Tensor, dweight: Tensor, dy: Tensor, x: Tensor, weight: Tensor, *, accumulate: bool
) -> None:
    """dweight (+)= dy^T x; dx = dy weight."""
    fp8 = weight.fp8 is not None
    dys, dy_scale = operand(dy, fp8=fp8)
    xs, x_scale = kept_operand(x, fp8=fp8)
    ws, w_scale = weight_operand(weight)
    product(dweight.data, dys.T, xs, scale=dy_scale * x_scale, accumulate=accumulate)
    product(dx.data, dys, ws, scale=dy_scale * w_scale)


def bias_gradient(dbias: Array, dy: Array, *, accumulate: bool) -> None:
    """Of the values, not of the codes: a sum of rounding errors would be added to every row."""
    sums = each_rows(lambda rows: to_float32(dy[rows]).sum(axis=0), *dy.shape)
    accumulated(dbias, np.stack(sums).sum(axis=0), accumulate)


def swiglu(y: Array, gate_up: Array) -> None:
    """y = gate / (1 + exp(-gate)) * up. gate_up: (N, 2 F), y: (N, F); rounded once, at the end."""
    F = y.shape[1]

    def work(rows: slice) -> None:
        gate, up = to_float32(gate_up[rows, :F]), to_float32(gate_up[rows, F:])
        y[rows] = gate * _sigmoid(gate) * up

    each_rows(work, y.shape[0], 2 * F)


def swiglu_backward(dgate_up: Array, dy: Array, gate_up: Array) -> None:
    """Its gradient, (N, 2 F), from dy, (N, F); each value rounded once."""
    F = dy.shape[1]

    def work(rows: slice) -> None:
        gate, up = to_float32(gate_up[rows, :F]), to_float32(gate_up[rows, F:])
        grad, sigmoid = to_float32(dy[rows]), _sigmoid(gate)
        silu = gate * sigmoid
        dgate_up[rows, F:] = grad * silu
        # silu' = sigmoid + silu (1 - sigmoid)
        dgate_up[rows, :F] = grad * up * (sigmoid + silu * (np.float32(1.0) - sigmoid))

    each_rows(work, dy.shape[0], 2 * F)


def _sigmoid(x: Float) -> Float:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives 0, the right limit
        return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


def embedding_gradient(
    dtable: Array, dx: Array, tokens: NDArray[np.int32], order: NDArray[np.int32], accumulate: bool
) -> None:
    """dtable[t] (+)= sum of the rows of dx whose token is t, in row order, rounded once."""
    if not accumulate:
        dtable[...] = 0
    if tokens.size == 0:
        return
    in_order = tokens[order]
    first = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
    sums = np.add.reduceat(to_float32(dx)[order], first, axis=0)
    touched = in_order[first]
    dtable[touched] = to_float32(dtable[touched]) + sums
