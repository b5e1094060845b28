"""Which attention kernels run, with which tile shapes, and their launches (equations:
attention.py)."""

import math
from dataclasses import dataclass, replace
from typing import Any

from llmq_nb.core.dtype import DType
from llmq_nb.kernels import (
    attention_backward,
    attention_dkdv,
    attention_dkdv_parts,
    attention_forward,
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_dkdv,
    attention_hopper_items,
    attention_simt,
)
from llmq_nb.kernels.attention_backward import padded_length
from llmq_nb.kernels.attention_hopper_tiles import CC, Wgmma
from llmq_nb.kernels.attention_tiles import LEAST_BLOCKS, AttentionShape, Problem, Tile
from llmq_nb.kernels.compile import Options
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import SIMULATED

LOG2E = math.log2(math.e)
MULTIPROCESSORS = 132
"""Of an H200: where no GPU says how many."""
ITEMS, PAIRS = attention_hopper_items.SHAPES


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile shape of each kernel, which is also the choice between mma.sync (Tile) and wgmma."""

    forward: Tile | Wgmma
    dkdv: Tile | Wgmma
    dq: Tile | Wgmma


def _mma_tiles(D: int, cc: tuple[int, int]) -> Tiles:
    """mma.sync without regard to the heads: two blocks a multiprocessor where it has 100 KB of
    shared memory (8.6, 8.9, 12.x), the largest elsewhere."""
    small = cc not in ((8, 0), (10, 0))
    pick = -1 if small else 0
    return Tiles(
        forward=attention_forward.TILES[D][1 if small else 0],
        dkdv=attention_dkdv.TILES[D][pick],
        dq=attention_backward.TILES[D][pick],
    )


def default_tiles(
    shape: AttentionShape, cc: tuple[int, int], multiprocessors: int = MULTIPROCESSORS
) -> Tiles:
    """Tile shapes without tuning, by what was faster on an H200 (bench/README.md).

    dK and dV: where query heads share keys, one block has so much to do that dividing it pays: by
    mma.sync at D = 128 between two parts of a block; by wgmma between two blocks where there are no
    more items than multiprocessors. Otherwise, at D = 128, a block takes item after item.
    """
    D = shape.D
    if cc == CC:
        items = shape.B * shape.G * cdiv(shape.T, attention_hopper_items.KEYS)
        dkdv = ITEMS if D == 128 else attention_hopper_dkdv.SHAPES[D][0]
        if items <= multiprocessors:
            dkdv = PAIRS
        return Tiles(attention_hopper.SHAPES[D][0], dkdv, attention_hopper_backward.SHAPES[D][0])
    tiles = _mma_tiles(D, cc)
    if D == 128 and shape.group > 1:
        return replace(tiles, dkdv=attention_dkdv_parts.TILES[D][0])
    return tiles


def candidates(D: int, cc: tuple[int, int]) -> dict[str, dict[int, Tile | Wgmma]]:
    """The shapes that a card may choose among, by kernel (field of Tiles) and number.

    A number belongs to its shape for good, for runs keep it: a new shape gets the next one.
    """
    if cc == CC:  # the numbers left out were mma.sync's, which was never the faster there
        return {
            "forward": dict(zip((0, 3, 4), attention_hopper.SHAPES[D], strict=False)),
            "dkdv": {0: attention_hopper_dkdv.SHAPES[D][0], 5: ITEMS, 6: PAIRS},
            "dq": {0: attention_hopper_backward.SHAPES[D][0]},
        }
    found: dict[str, dict[int, Tile | Wgmma]] = {}
    for name, shapes in (
        ("forward", attention_forward.TILES[D]),
        ("dkdv", attention_dkdv.TILES[D] + attention_dkdv_parts.TILES[D]),
        ("dq", attention_backward.TILES[D]),
    ):
        zero = getattr(_mma_tiles(D, cc), name)
        found[name] = dict(enumerate([zero, *(shape for shape in shapes if shape != zero)]))
    return found


def _chosen(tiles: Tiles | None, p: Problem) -> Tiles:
    """The shapes to launch with: wgmma kernels are causal only."""
    if tiles is None:
        if SIMULATED:
            return default_tiles(p, (8, 0))
        from llmq_nb.core.device import current_device

        device = current_device()
        tiles = default_tiles(p, device.cc, device.multiprocessors)
    if p.causal:
        return tiles
    other = default_tiles(p, (8, 0))
    shapes = [
        getattr(other if isinstance(getattr(tiles, name), Wgmma) else tiles, name)
        for name in ("forward", "dkdv", "dq")
    ]
    return Tiles(*shapes)


# ---- forward -----------------------------------------------------------------------------------
def launch_forward(
    out: int, lse: int, q: int, k: int, v: int, p: Problem, tiles: Tiles | None, stream: Any
) -> None:
    """Write out and lse (device addresses), in stream order."""
    if p.B * p.T == 0:
        return
    if p.dtype is DType.FP32:
        launch = kernel(
            attention_simt.make_attention_forward_fp32, attention_simt.FORWARD_SIGNATURE,
            attention_simt.THREADS, D=p.D,
        )  # fmt: skip
        rows = p.B * p.H * p.T
        launch(
            stream, (cdiv(rows, attention_simt.THREADS // 32),), out, lse, q, k, v,
            p.segment_start, rows, p.T, p.H, p.group, p.q_stride, p.kv_stride, int(p.causal),
            p.scale,
        )  # fmt: skip
        return
    tile = _chosen(tiles, p).forward
    if isinstance(tile, Wgmma):
        attention_hopper.forward_launch(out, lse, q, k, v, p, tile, stream)
        return
    launch = kernel(
        attention_forward.make_attention_forward, attention_forward.SIGNATURE, tile.warps * 32,
        attention_forward.shared_bytes(p.D, tile), Options(min_blocks=tile.blocks),
        **attention_forward.constants(p.D, tile, causal=p.causal),
    )  # fmt: skip
    heads, count = p.B * p.H, cdiv(p.T, tile.queries)
    launch(
        stream, (heads * count,), out, lse, q, k, v, p.segment_start, heads, p.T, p.H, p.group,
        count, p.swath(2, count, p.group), p.q_stride, p.kv_stride, p.scale * LOG2E,
    )  # fmt: skip


# ---- backward ----------------------------------------------------------------------------------
def _backward_fp32(
    gradients: tuple[int, int, int], strides: tuple[int, int], inputs: tuple[int, ...],
    p: Problem, stream: Any,
) -> None:  # fmt: skip
    dq, dk, dv = gradients
    simt = attention_simt
    for factory, signature, outputs, stride, heads in (
        (simt.make_attention_dq_fp32, simt.DQ_SIGNATURE, (dq,), strides[0], p.H),
        (simt.make_attention_dkdv_fp32, simt.DKDV_SIGNATURE, (dk, dv), strides[1], p.G),
    ):
        launch = kernel(factory, signature, simt.THREADS, D=p.D)
        rows = p.B * heads * p.T
        launch(
            stream, (cdiv(rows, simt.THREADS // 32),), *outputs, *inputs, p.segment_start, rows,
            p.T, p.H, p.group, p.q_stride, p.kv_stride, stride, int(p.causal), p.scale,
        )  # fmt: skip


def launch_dkdv(
    dk: int, dv: int, stride: int, stats: int, dout: int, qkv: tuple[int, int, int], p: Problem,
    tile: Tile | Wgmma, stream: Any,
) -> None:  # fmt: skip
    """Write dk and dv (bfloat16, `stride` bytes a token) from the inputs and `stats`."""
    if isinstance(tile, Wgmma):
        module = attention_hopper_items if tile.cluster else attention_hopper_dkdv
        module.dkdv_launch(dk, dv, stride, stats, dout, qkv, p, tile, stream)
        return
    factory, module = attention_dkdv.make_attention_dkdv, attention_dkdv
    if tile.parts == 2:
        factory, module = attention_dkdv_parts.make_attention_dkdv_parts, attention_dkdv_parts
    launch = kernel(
        factory, attention_dkdv.SIGNATURE, tile.warps * tile.parts * 32,
        module.shared_bytes(p.D, tile), Options(min_blocks=tile.blocks),
        **attention_backward.constants(p.D, tile, causal=p.causal),
    )  # fmt: skip
    heads, count = p.B * p.G, cdiv(p.T, tile.keys)
    swath = p.swath(2 * p.group, count, least=2 * LEAST_BLOCKS)  # two blocks a multiprocessor
    launch(
        stream, (heads * count,), dk, dv, *qkv, dout, stats, p.segment_start, heads, p.T,
        padded_length(p.T), p.H, p.group, count, swath, p.q_stride, p.kv_stride, stride, p.scale,
        p.scale * LOG2E,
    )  # fmt: skip


def launch_dq(
    dq: int, stride: int, stats: int, dout: int, qkv: tuple[int, int, int], p: Problem,
    tile: Tile | Wgmma, stream: Any,
) -> None:  # fmt: skip
    """Write dq (bfloat16, `stride` bytes a token) from the inputs and `stats`."""
    if isinstance(tile, Wgmma):
        attention_hopper_backward.dq_launch(dq, stride, stats, dout, qkv, p, tile, stream)
        return
    launch = kernel(
        attention_backward.make_attention_dq, attention_backward.DQ_SIGNATURE, tile.warps * 32,
        attention_backward.shared_bytes(p.D, tile), Options(min_blocks=tile.blocks),
        **attention_backward.constants(p.D, tile, causal=p.causal),
    )  # fmt: skip
    heads, count = p.B * p.H, cdiv(p.T, tile.queries)
    launch(
        stream, (heads * count,), dq, *qkv, dout, stats, p.segment_start, heads, p.T,
        padded_length(p.T), p.H, p.group, count, p.swath(2, count, p.group), p.q_stride,
        p.kv_stride, stride, p.scale, p.scale * LOG2E,
    )  # fmt: skip


def launch_backward(
    gradients: tuple[int, int, int], strides: tuple[int, int], stats: int, dout: int, out: int,
    lse: int, qkv: tuple[int, int, int], p: Problem, tiles: Tiles | None, stream: Any,
) -> None:  # fmt: skip
    """Write dq, dk, dv (device addresses; strides: bytes a token of dq, of dk and dv)."""
    if p.B * p.T == 0:
        return
    if p.dtype is DType.FP32:
        _backward_fp32(gradients, strides, (*qkv, dout, out, lse), p, stream)
        return
    chosen = _chosen(tiles, p)
    attention_backward.statistics_launch(
        stats, out, dout, lse, B=p.B, T=p.T, H=p.H, D=p.D, stream=stream
    )
    dq, dk, dv = gradients
    launch_dkdv(dk, dv, strides[1], stats, dout, qkv, p, chosen.dkdv, stream)
    launch_dq(dq, strides[0], stats, dout, qkv, p, chosen.dq, stream)
