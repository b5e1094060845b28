"""The sm_90 attention kernels on emulated mbarriers, TMA and wgmma (hopper_emulation.py), against
the oracle and bounds of attention_checks; test_attention_gpu runs them on a GPU."""

from typing import Any

import pytest

from llmq_nb.kernels import (
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_dkdv,
    attention_hopper_tiles,
)
from llmq_nb.kernels.attention_launch import default_tiles
from tests.kernels.attention_checks import check_backward, check_forward
from tests.kernels.harness import Device, run_sim
from tests.kernels.hopper_emulation import install

MODULES = [
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_dkdv,
    attention_hopper_tiles,
]


def check(device: Device, **case: Any) -> None:
    """One block, so that it takes several work items."""
    install(MODULES, blocks=1)
    tiles = default_tiles(case["D"], attention_hopper_tiles.CC)
    check_forward(device, tiles=tiles, **case)
    check_backward(device, tiles=tiles, **case)


# T = 200: two 192-row tiles, the second reaching beyond the padded statistics; 66: two heads of a
# group, a warpgroup with two rows, one above the diagonal
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dict(B=1, T=200, H=1, G=1, D=64, mean=40.0), id="64"),
        pytest.param(dict(B=1, T=66, H=2, G=1, D=128, mean=None), id="128"),
    ],
)
def test_emulated(case) -> None:
    run_sim(check, **case)
