"""The sm_90 attention kernels on emulated mbarriers, TMA and wgmma (hopper_emulation.py), against
the oracle and bounds of attention_checks; test_attention_gpu runs them on a GPU."""

from dataclasses import replace
from typing import Any

import pytest

from llmq_nb.kernels import (
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_dkdv,
    attention_hopper_tiles,
)
from llmq_nb.kernels.attention_hopper_tiles import CC
from llmq_nb.kernels.attention_launch import Tiles, default_tiles
from tests.kernels.attention_checks import check_backward, check_forward
from tests.kernels.harness import Device, run_sim
from tests.kernels.hopper_emulation import install

MODULES = [
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_dkdv,
    attention_hopper_tiles,
]


def check(device: Device, tiles: Tiles, **case: Any) -> None:
    """One block, so that it takes several work items."""
    install(MODULES, blocks=1)
    check_forward(device, tiles=tiles, **case)
    if tiles.forward == default_tiles(case["D"], CC).forward:  # the backward kernels have one shape
        check_backward(device, tiles=tiles, **case)


# T = 200: two 192-row tiles, the first with rows before the sequence; documents that begin inside a
# tile. 66: two heads of a group, a warpgroup with two rows, one above the diagonal.
CASES = [
    pytest.param(
        replace(default_tiles(64, CC), forward=forward),
        dict(B=1, T=200, H=2, G=1, D=64, mean=40.0),
        id=f"64-{forward.warpgroups}-{forward.columns}",
    )
    for forward in attention_hopper.SHAPES[64]
] + [
    pytest.param(default_tiles(128, CC), dict(B=1, T=66, H=2, G=1, D=128, mean=None), id="128"),
]  # fmt: skip


@pytest.mark.parametrize(("tiles", "case"), CASES)
def test_emulated(tiles, case) -> None:
    run_sim(check, tiles=tiles, **case)
