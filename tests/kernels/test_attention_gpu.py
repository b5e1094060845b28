"""Attention on a GPU, every implementation and tile shape it can run (checks and bounds:
attention_checks.py)."""

from dataclasses import replace
from itertools import zip_longest

import pytest

from llmq_nb.core.device import device_count, open_device
from llmq_nb.kernels import attention
from llmq_nb.kernels.attention_hopper_tiles import CC, Wgmma
from llmq_nb.kernels.attention_launch import Tiles, candidates, default_tiles
from llmq_nb.kernels.attention_tiles import AttentionShape, Tile
from llmq_nb.kernels.ptx import SIMULATED as SIMULATOR
from tests.kernels.attention_checks import (
    FP32_CASES,
    check_backward,
    check_forward,
    check_nothing_to_do,
    check_rejections,
    check_repeats,
    check_user_functions,
)
from tests.kernels.harness import Device

# T: 1; either side of 64 and 128 (every tile edge); several tiles with a ragged end; documents
# longer and shorter than a tile; groups of 1, 2, 3, 6, 7 (the models'); more work items than twice
# the multiprocessors of a GPU, of the forward pass and (24 x 140) of dK and dV.
GPU_SHAPES = [
    (1, 1, 1, 1, None),
    (2, 17, 3, 1, 5.0),
    (1, 63, 2, 2, None),
    (3, 64, 2, 1, None),
    (1, 65, 6, 2, 20.0),
    (2, 127, 2, 1, None),
    (1, 128, 4, 2, 40.0),
    (1, 129, 1, 1, None),
    (2, 200, 12, 2, 30.0),
    (1, 513, 14, 2, 3.0),
    (1, 1000, 3, 1, 150.0),
    (2, 1024, 2, 2, None),
    (8, 257, 14, 2, 60.0),
    (24, 140, 12, 6, 50.0),
]


def compute_capability() -> tuple[int, int]:
    """This machine's; without a GPU one whose kernels run everywhere, so that tests have names."""
    return (8, 0) if SIMULATOR or device_count() == 0 else open_device(0).cc


def implementations() -> list[str]:
    """What this machine can run: mma.sync everywhere, wgmma on sm_90."""
    return ["mma.sync", "wgmma"] if compute_capability() == CC else ["mma.sync"]


def tiles_of(implementation: str, D: int, B: int = 1, T: int = 1, H: int = 1, G: int = 1) -> Tiles:
    shape = AttentionShape(B, T, H, G, D)
    return default_tiles(shape, CC if implementation == "wgmma" else (8, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("D", attention.HEAD_DIMS)
@pytest.mark.parametrize(("B", "T", "H", "G", "mean"), GPU_SHAPES)
def test_forward(gpu: Device, B, T, H, G, D, mean, implementation) -> None:
    check_forward(gpu, B, T, H, G, D, mean, tiles_of(implementation, D, B, T, H, G))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("D", attention.HEAD_DIMS)
@pytest.mark.parametrize(("B", "T", "H", "G", "mean"), GPU_SHAPES)
def test_backward(gpu: Device, B, T, H, G, D, mean, implementation) -> None:
    check_backward(gpu, B, T, H, G, D, mean, tiles_of(implementation, D, B, T, H, G))


def cards() -> list[tuple[int, int]]:
    """Whose candidates this machine can run."""
    return [(8, 0), CC] if compute_capability() == CC else [compute_capability()]


def every_tile() -> list[object]:
    """Sets of shapes in which each candidate of each kernel occurs."""
    found = []
    for D in attention.HEAD_DIMS:
        for cc in cards():
            shapes = [list(kind.values()) for kind in candidates(D, cc).values()]
            for i, row in enumerate(zip_longest(*shapes)):
                chosen = [shape or kind[0] for shape, kind in zip(row, shapes, strict=True)]
                found.append(pytest.param(D, Tiles(*chosen), id=f"{D}-{cc[0]}-{i}"))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "tiles"), every_tile())
@pytest.mark.parametrize(("T", "mean"), [(131, None), (333, 25.0)])
def test_every_tile_shape(gpu: Device, D, tiles, T, mean) -> None:
    check_forward(gpu, 2, T, 6, 2, D, mean, tiles)
    check_backward(gpu, 2, T, 6, 2, D, mean, tiles)


# dkdv in which two parts of a block or two blocks add up, or blocks take items
OTHER_DKDV: list[tuple[int, Tile | Wgmma]] = [
    (D, shape)
    for D in attention.HEAD_DIMS
    for cc in cards()
    for shape in candidates(D, cc)["dkdv"].values()
    if (shape.cluster > 0 if isinstance(shape, Wgmma) else shape.parts > 1)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "shape"), OTHER_DKDV)
@pytest.mark.parametrize(("B", "T", "H", "G", "mean"), GPU_SHAPES)
def test_other_dkdv(gpu: Device, B, T, H, G, D, mean, shape) -> None:
    check_backward(gpu, B, T, H, G, D, mean, replace(tiles_of("mma.sync", D), dkdv=shape))


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "shape"), OTHER_DKDV)
def test_other_dkdv_repeats_bit_for_bit(gpu: Device, D, shape) -> None:
    """With more items than multiprocessors."""
    check_repeats(gpu, 24, 140, 12, 6, D, replace(tiles_of("mma.sync", D), dkdv=shape))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("D", attention.HEAD_DIMS)
def test_large_scores(gpu: Device, D, implementation) -> None:
    """Rows whose probability sits in one key: the running maximum carries them."""
    check_forward(gpu, 1, 300, 2, 1, D, tiles=tiles_of(implementation, D), size=4.0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FP32_CASES)
def test_fp32(gpu: Device, case) -> None:
    check_forward(gpu, **{**case, "T": 75})
    check_backward(gpu, **{**case, "T": 75})


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "D"), [(77, 64), (130, 128)])
def test_user_functions(gpu: Device, T, D, causal) -> None:
    check_user_functions(gpu, 2, T, 4, 2, D, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("D", attention.HEAD_DIMS)
def test_repeats_bit_for_bit(gpu: Device, D, implementation) -> None:
    check_repeats(gpu, 2, 700, 6, 2, D, tiles_of(implementation, D, 2, 700, 6, 2))


@pytest.mark.gpu
def test_nothing_to_do(gpu: Device) -> None:
    check_nothing_to_do(gpu)


@pytest.mark.gpu
def test_rejections(gpu: Device) -> None:
    check_rejections(gpu)
