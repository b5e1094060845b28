"""Attention's oracle, its compiled code, and its kernels in the simulator (checks and bounds:
attention_checks.py; on a GPU: test_attention_gpu.py)."""

import numpy as np
import pytest

from llmq_nb.kernels import (
    attention,
    attention_backward,
    attention_dkdv,
    attention_dkdv_parts,
    attention_forward,
)
from llmq_nb.kernels.attention_launch import Tiles, default_tiles
from llmq_nb.kernels.attention_tiles import AttentionShape, Tile
from llmq_nb.kernels.compile import to_ptx
from tests.kernels.attention_checks import (
    FP32_CASES,
    check_backward,
    check_forward,
    check_nothing_to_do,
    check_rejections,
)
from tests.kernels.harness import run_sim


# ---- the oracle --------------------------------------------------------------------------------
def test_reference_gradients_are_the_derivative_of_the_reference() -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 6, 4, 8))
    k, v = rng.standard_normal((2, 1, 6, 2, 8))
    dout, starts = rng.standard_normal(q.shape), np.array([[0, 0, 0, 3, 3, 5]])
    gradients = attention.attention_backward_ref(dout, q, k, v, starts)
    for i, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        shifted = [
            [x + (sign * 1e-5 * direction if i == j else 0) for j, x in enumerate((q, k, v))]
            for sign in (1, -1)
        ]
        losses = [
            (attention.attention_forward_ref(x[0], x[1], x[2], starts)[0] * dout).sum()
            for x in shifted
        ]
        numeric = (losses[0] - losses[1]) / 2e-5
        assert abs(numeric - (gradient * direction).sum()) < 1e-8 * abs(dout).sum()


# ---- compiled code -----------------------------------------------------------------------------
PRODUCTS = {
    attention_forward: 2, attention_dkdv: 4, attention_dkdv_parts: 4, attention_backward: 3
}  # fmt: skip


@pytest.mark.parametrize("module", PRODUCTS)
def test_products_run_on_tensor_cores(module) -> None:
    """One mma.sync for each 16 x 8 x 16 of the tile's products in one pass of the loop, operands by
    ldmatrix, tiles by 16-byte cp.async. (Registers and stack: test_compile.)"""
    case = next(c for c in module.COMPILE_CASES if "QUERIES" in c.constants)
    ptx = to_ptx(case.factory(**case.constants), case.signature, case.threads, (8, 9), case.options)
    extents = case.constants["QUERIES"] * case.constants["KEYS"] * case.constants["D"]
    assert (
        ptx.count("mma.sync")
        == PRODUCTS[module] * extents // (16 * 8 * 16) // case.constants["WARPS"]
    )
    assert "ldmatrix" in ptx and "cp.async.cg.shared.global" in ptx
    assert ".local" not in ptx  # no register tile is indexed at run time


def test_shapes_for_two_blocks_a_multiprocessor() -> None:
    """Every kernel has a shape of which two blocks fit 100 KB (1 KB of each is CUDA's)."""
    half = 102400 // 2 - 1024
    for D in attention.HEAD_DIMS:
        small = default_tiles(AttentionShape(1, 1, 1, 1, D), (8, 6))
        for module, shape in (
            (attention_forward, small.forward),
            (attention_dkdv, small.dkdv),
            (attention_backward, small.dq),
        ):
            assert isinstance(shape, Tile)
            assert module.shared_bytes(D, shape) <= half


# ---- simulator ---------------------------------------------------------------------------------
# Two warps at D = 64 (a load step must be eight rows). T: one short tile; past a tile by one with a
# border in it; two 16-row tiles a warp; a group of three.
SMALL = Tiles(Tile(32, 16, 2), Tile(16, 32, 2), Tile(32, 16, 2))
LARGE = Tiles(Tile(64, 16, 2), Tile(16, 64, 2, stages=1), Tile(64, 16, 2, stages=1))
PARTS = Tiles(SMALL.forward, Tile(16, 32, 2, stages=1, parts=2), SMALL.dq)
PARTS_STAGES = Tiles(SMALL.forward, Tile(16, 32, 2, parts=2), SMALL.dq)
SIMULATED = [
    pytest.param(dict(B=1, T=3, H=1, G=1, D=64, mean=None, tiles=SMALL), id="short"),
    pytest.param(dict(B=1, T=33, H=1, G=1, D=64, mean=8.0, tiles=SMALL), id="documents"),
    pytest.param(dict(B=1, T=36, H=1, G=1, D=64, mean=None, tiles=LARGE), id="two-m-tiles"),
    pytest.param(dict(B=2, T=19, H=3, G=1, D=64, mean=4.0, tiles=SMALL), id="group-of-three"),
    pytest.param(dict(B=1, T=33, H=3, G=1, D=64, mean=12.0, tiles=PARTS), id="parts"),
    pytest.param(dict(B=1, T=50, H=1, G=1, D=64, mean=None, tiles=PARTS_STAGES), id="parts-stages"),
]


@pytest.mark.parametrize("case", SIMULATED)
def test_forward_simulated(case) -> None:
    run_sim(check_forward, **case)


@pytest.mark.parametrize("case", SIMULATED)
def test_backward_simulated(case) -> None:
    run_sim(check_backward, **case)


@pytest.mark.parametrize("case", FP32_CASES)
def test_fp32_simulated(case) -> None:
    run_sim(check_forward, **case)
    run_sim(check_backward, **case)


def test_nothing_to_do_simulated() -> None:
    run_sim(check_nothing_to_do)


def test_rejections_simulated() -> None:
    run_sim(check_rejections)
