"""The sm_90 attention kernels on emulated mbarriers, TMA and wgmma (hopper_emulation.py), against
the oracle and bounds of attention_checks; test_attention_gpu runs them on a GPU."""

from dataclasses import replace
from typing import Any

import pytest

from llmq_nb.kernels import (
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_dkdv,
    attention_hopper_items,
    attention_hopper_steps,
    attention_hopper_tiles,
    attention_hopper_transposed,
)
from llmq_nb.kernels.attention_hopper_tiles import CC, Wgmma
from llmq_nb.kernels.attention_launch import Tiles, default_tiles
from llmq_nb.kernels.attention_tiles import AttentionShape
from tests.kernels.attention_checks import check_backward, check_forward
from tests.kernels.harness import Device, run_sim
from tests.kernels.hopper_emulation import install

MODULES = [
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_dkdv,
    attention_hopper_items,
    attention_hopper_steps,
    attention_hopper_tiles,
    attention_hopper_transposed,
]


def check(device: Device, tiles: Tiles, forward: bool, backward: bool, **case: Any) -> None:
    """One block, so that it takes several work items."""
    install(MODULES, blocks=1)
    if forward:
        check_forward(device, tiles=tiles, **case)
    if backward:
        check_backward(device, tiles=tiles, **case)


# T = 200: two 192-row tiles, the first with rows before the sequence; documents that begin inside a
# tile. 66: two heads of a group, a warpgroup with two rows, one above the diagonal. A cluster whose
# second block has fewer tiles: three heads; none: one head of 60.
LONG = dict(B=1, T=200, H=2, G=1, D=64, mean=40.0)
WIDE = dict(B=1, T=66, H=2, G=1, D=128, mean=None)
ODD = dict(B=1, T=100, H=3, G=1, D=64, mean=50.0)
SHORT = dict(B=1, T=60, H=1, G=1, D=64, mean=None)
BLOCK, ITEMS, PAIR = Wgmma(2, 64), *attention_hopper_items.SHAPES
CASES = [
    *(pytest.param(LONG, dict(forward=f), id=f"64-{f.warpgroups}-{f.columns}")
      for f in attention_hopper.SHAPES[64]),
    pytest.param(WIDE, dict(forward=attention_hopper.SHAPES[128][0]), id="128"),
    *(pytest.param(case, dict(dkdv=shape), id=f"dkdv-{case['D']}-{case['T']}-{shape.cluster}")
      for case, shape in ((ODD, BLOCK), (LONG, ITEMS), (ODD, PAIR), (SHORT, PAIR), (WIDE, BLOCK),
                          (WIDE, ITEMS), (WIDE, PAIR))),
]  # fmt: skip


@pytest.mark.parametrize(("case", "shapes"), CASES)
def test_emulated(case: dict[str, Any], shapes: dict[str, Wgmma]) -> None:
    shape = AttentionShape(*(case[name] for name in "BTHGD"))
    tiles = replace(default_tiles(shape, CC), **shapes)
    run_sim(check, tiles=tiles, forward="forward" in shapes, backward="dkdv" in shapes, **case)
