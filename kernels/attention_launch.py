"""Which attention kernels run, with which tile shapes, and their launches (equations:
attention.py)."""

import math
from dataclasses import dataclass
from typing import Any

from llmq_nb.core.dtype import DType
from llmq_nb.kernels import (
    attention_backward,
    attention_dkdv,
    attention_forward,
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_dkdv,
    attention_simt,
)
from llmq_nb.kernels.attention_backward import padded_length
from llmq_nb.kernels.attention_hopper_tiles import CC, Wgmma
from llmq_nb.kernels.attention_tiles import LEAST_BLOCKS, Problem, Tile
from llmq_nb.kernels.compile import Options
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import SIMULATED

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile shape of each kernel, which is also the choice between mma.sync (Tile) and wgmma."""

    forward: Tile | Wgmma
    dkdv: Tile | Wgmma
    dq: Tile | Wgmma


def default_tiles(D: int, cc: tuple[int, int]) -> Tiles:
    """Tile shapes for a compute capability without tuning: wgmma on 9.0; two blocks a
    multiprocessor where it has 100 KB of shared memory (8.6, 8.9, 12.x), the largest elsewhere."""
    if cc == CC:
        return Tiles(
            attention_hopper.SHAPES[D][0],
            attention_hopper_dkdv.SHAPES[D][0],
            attention_hopper_backward.SHAPES[D][0],
        )
    small = cc not in ((8, 0), (10, 0))
    pick = -1 if small else 0
    return Tiles(
        forward=attention_forward.TILES[D][1 if small else 0],
        dkdv=attention_dkdv.TILES[D][pick],
        dq=attention_backward.TILES[D][pick],
    )


def candidates(D: int, cc: tuple[int, int]) -> dict[str, list[Tile | Wgmma]]:
    """Every shape that a card can run, by kernel (field of Tiles); the default is the first."""
    found: dict[str, list[Tile | Wgmma]] = {
        "forward": [*attention_forward.TILES[D]],
        "dkdv": [*attention_dkdv.TILES[D]],
        "dq": [*attention_backward.TILES[D]],
    }
    if cc == CC:
        found["forward"] += attention_hopper.SHAPES[D]
        found["dkdv"] += attention_hopper_dkdv.SHAPES[D]
        found["dq"] += attention_hopper_backward.SHAPES[D]
    default = default_tiles(D, cc)
    for name, shapes in found.items():
        first = getattr(default, name)
        found[name] = [first, *(shape for shape in shapes if shape != first)]
    return found


def _chosen(tiles: Tiles | None, p: Problem) -> Tiles:
    """The shapes to launch with: wgmma kernels are causal only."""
    if tiles is None:
        if SIMULATED:
            return default_tiles(p.D, (8, 0))
        from llmq_nb.core.device import current_device

        tiles = default_tiles(p.D, current_device().cc)
    if p.causal:
        return tiles
    other = default_tiles(p.D, (8, 0))
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
        attention_hopper_dkdv.dkdv_launch(dk, dv, stride, stats, dout, qkv, p, tile, stream)
        return
    launch = kernel(
        attention_dkdv.make_attention_dkdv, attention_dkdv.SIGNATURE, tile.warps * 32,
        attention_dkdv.shared_bytes(p.D, tile), Options(min_blocks=tile.blocks),
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
