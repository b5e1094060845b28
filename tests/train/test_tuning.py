"""What `compile --tune` keeps and what a run takes of it: the file's logic without a GPU; timing
and runs on one (`gpu`)."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.attention_choice import KERNELS, AttentionShape, chosen_tiles, is_attention
from llmq_nb.kernels.attention_hopper_tiles import Wgmma
from llmq_nb.kernels.attention_launch import candidates, default_tiles
from llmq_nb.kernels.attention_tiles import Tile
from llmq_nb.kernels.matmul import Shape
from llmq_nb.kernels.matmul_swiglu import FusedProduct
from llmq_nb.kernels.products import Products
from llmq_nb.train import tuning
from llmq_nb.train.tuning import (
    Timed,
    keep_apart,
    keep_machine_tuning,
    known_tuning,
    machine_tuning,
)
from tests.e2e.runs import Cli, make_run

CARD: Any = SimpleNamespace(name="NVIDIA X/Y 16")
SHAPE = AttentionShape(2, 160, 4, 2, 64)
FORWARD = SHAPE.name("forward")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the machine's file lies."""
    monkeypatch.setattr(tuning, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """As `folder`, on a machine without cuBLASLt."""
    monkeypatch.setattr(tuning, "library_version", lambda: 130100)
    return folder


# ---- the machine's file ------------------------------------------------------------------------
def test_a_run_adds_new_products_and_changes_nothing(machine: Path) -> None:
    assert machine_tuning(CARD) == {}
    keep_machine_tuning(CARD, {"forward 1x2x3": 4, FORWARD: 0})
    keep_machine_tuning(CARD, {"forward 1x2x3": 5, "dgrad 1x2x3": 6})
    assert machine_tuning(CARD) == {"forward 1x2x3": 4, "dgrad 1x2x3": 6}
    assert len(list(machine.iterdir())) == 1


def test_tuning_replaces(machine: Path) -> None:
    keep_machine_tuning(CARD, {"forward 1x2x3": 4, "dgrad 1x2x3": 6})
    keep_machine_tuning(CARD, {"forward 1x2x3": 5, FORWARD: 2}, replace=True)
    assert machine_tuning(CARD) == {"forward 1x2x3": 5, "dgrad 1x2x3": 6, FORWARD: 2}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "b"}', '{"a": null}'])
def test_a_torn_file_counts_as_none(machine: Path, text: str) -> None:
    keep_machine_tuning(CARD, {"a": 1})
    next(machine.iterdir()).write_text(text)
    assert machine_tuning(CARD) == {}
    keep_machine_tuning(CARD, {"b": 2})
    assert machine_tuning(CARD) == {"b": 2}


def test_cards_do_not_share(machine: Path) -> None:
    keep_machine_tuning(CARD, {"a": 1})
    assert machine_tuning(SimpleNamespace(name="NVIDIA X/Y 24")) == {}  # type: ignore[arg-type]


def test_a_run_from_before_fused_products_keeps_them_apart(machine: Path) -> None:
    """Its gate+up product alone has a choice; a new run, or one that chose, is left as it is."""
    alone = Shape("forward", 7, 96, 48, DType.BF16, DType.BF16)
    fused, other = dataclasses.replace(alone, swiglu=True), dataclasses.replace(alone, M=48)
    names = str(alone), str(fused), str(other)
    for saved, want in (
        ({names[0]: 3, names[2]: 1}, 0),
        ({names[0]: 3, names[1]: 2}, 2),
        (None, 1),
    ):
        keep_machine_tuning(CARD, {names[0]: 0, names[1]: 1}, replace=True)
        products = Products(device=0, workspace=0, choices=known_tuning(CARD, saved))
        library: Any = SimpleNamespace()
        for shape in (alone, fused, other):  # as they are planned before this is called
            choice = products.choices.get(str(shape), 0)
            made = FusedProduct(shape, library, algorithm=choice) if shape.swiglu else library
            products._plans[shape] = made
        before = dict(products.choices)
        keep_apart(products, saved)
        assert products.choices == before | {names[1]: want}
        assert products.plan(fused).algorithm == want


def test_a_resumed_run_keeps_its_own_choices(machine: Path) -> None:
    """Also those that it made by not choosing: attention of a run that knew none is the default."""
    kept = {"forward 1x2x3": 5, "dgrad 1x2x3": 6, FORWARD: 2}
    keep_machine_tuning(CARD, kept, replace=True)
    assert known_tuning(CARD, None) == kept
    assert known_tuning(CARD, {"forward 1x2x3": 1}) == {"forward 1x2x3": 1, "dgrad 1x2x3": 6}
    assert known_tuning(CARD, {FORWARD: 1})[FORWARD] == 1


# ---- choices -----------------------------------------------------------------------------------
CARDS = [(8, 0), (8, 9), (9, 0), (12, 0)]


@pytest.mark.parametrize("cc", CARDS)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("G", [4, 2])
def test_no_choice_is_the_default_and_is_noted(D: int, G: int, cc: tuple[int, int]) -> None:
    shape = dataclasses.replace(SHAPE, D=D, G=G)
    choices: dict[str, int] = {"forward 1x2x3": 3}
    tiles, shapes = chosen_tiles(choices, shape, cc, 132), candidates(D, cc)
    assert tiles == default_tiles(shape, cc, 132)
    assert choices.pop("forward 1x2x3") == 3
    assert [is_attention(name) for name in ("forward 1x2x3", *choices)] == [False, True, True, True]
    for kernel in KERNELS:
        assert shapes[kernel][choices[shape.name(kernel)]] == getattr(tiles, kernel)


@pytest.mark.parametrize(
    ("shape", "cc", "multiprocessors", "dkdv"),
    [
        ((8, 1024, 12, 2, 128), (9, 0), 132, Wgmma(2, 64, cluster=2)),  # 128 items
        ((8, 1024, 12, 2, 128), (9, 0), 114, Wgmma(2, 64, cluster=1)),
        ((8, 1025, 12, 2, 128), (9, 0), 132, Wgmma(2, 64, cluster=1)),  # 144 items
        ((8, 4096, 12, 12, 128), (9, 0), 132, Wgmma(2, 64, cluster=1)),
        ((8, 1024, 14, 2, 64), (9, 0), 132, Wgmma(2, 64, cluster=2)),
        ((8, 4096, 14, 2, 64), (9, 0), 132, Wgmma(2, 64)),
        ((8, 2048, 12, 2, 128), (8, 0), 108, Tile(64, 64, stages=1, parts=2)),
        ((8, 2048, 12, 2, 128), (12, 0), 170, Tile(64, 64, stages=1, parts=2)),
        ((8, 2048, 12, 12, 128), (8, 0), 108, Tile(64, 64)),
        ((8, 2048, 12, 12, 128), (8, 9), 128, Tile(32, 64, stages=1)),
        ((8, 2048, 14, 2, 64), (8, 0), 108, Tile(64, 64)),
    ],
)
def test_the_default_of_dk_and_dv_is_what_was_faster(
    shape: tuple[int, ...], cc: tuple[int, int], multiprocessors: int, dkdv: Tile | Wgmma
) -> None:
    """The table in bench/README.md."""
    assert default_tiles(AttentionShape(*shape), cc, multiprocessors).dkdv == dkdv


def test_a_number_keeps_its_shape() -> None:
    """What runs have stored since 2026-12-01 still means the same kernels."""
    assert candidates(128, (9, 0)) == {
        "forward": {0: Wgmma(2, 128)},
        "dkdv": {0: Wgmma(2, 64), 5: Wgmma(2, 64, cluster=1), 6: Wgmma(2, 64, cluster=2)},
        "dq": {0: Wgmma(2, 64)},
    }
    assert candidates(64, (9, 0))["forward"] == {0: Wgmma(3, 96), 3: Wgmma(3, 128), 4: Wgmma(4, 64)}
    assert candidates(128, (8, 0))["dkdv"] == {
        0: Tile(64, 64),
        1: Tile(32, 64, stages=1),
        2: Tile(64, 64, stages=1, parts=2),
        3: Tile(32, 64, parts=2),
    }
    assert candidates(128, (8, 9))["dkdv"][0] == Tile(32, 64, stages=1)
    assert candidates(64, (8, 9))["forward"] == {0: Tile(64, 64), 1: Tile(128, 64)}


def test_a_choice_is_a_candidate_and_an_unknown_one_the_default() -> None:
    shapes, shape = candidates(64, (8, 9)), SHAPE
    assert all(len(found) == len(set(found.values())) > 1 for found in shapes.values())
    choices = {shape.name("dq"): 1, FORWARD: len(shapes["forward"]), shape.name("dkdv"): -1}
    tiles, default = chosen_tiles(choices, shape, (8, 9), 128), default_tiles(shape, (8, 9), 128)
    assert tiles.dq == shapes["dq"][1] != default.dq
    assert (tiles.forward, tiles.dkdv) == (default.forward, default.dkdv)
    assert choices == {shape.name("dq"): 1, FORWARD: 0, shape.name("dkdv"): 0}


def test_a_number_that_is_no_longer_used_is_the_default() -> None:
    shape = dataclasses.replace(SHAPE, D=128)
    choices = {shape.name("dkdv"): 1}  # was a shape of mma.sync
    assert chosen_tiles(choices, shape, (9, 0), 132).dkdv == Wgmma(2, 64, cluster=2)
    assert choices[shape.name("dkdv")] == 6


@pytest.mark.parametrize(
    ("seconds", "chosen"), [([1.0], 4), ([1.0, 0.99], 4), ([1.0, 0.97, 0.9], 7), ([1.0, 2.0], 4)]
)
def test_only_a_clearly_faster_candidate_is_chosen(seconds: list[float], chosen: int) -> None:
    """By the number that it is kept under."""
    assert Timed("x", seconds, [""] * len(seconds), [4, 0, 7]).chosen == chosen


def test_without_a_gpu_is_one_line(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path, {})
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # where there is one
    result = cli("compile", "config.toml", "--tune", cwd=run, env=hidden)
    assert result.code == 2 and result.err.count("\n") == 1
    assert "NVIDIA" in result.err and "cpu" in result.err


# ---- on a GPU ----------------------------------------------------------------------------------
@pytest.mark.gpu
def test_tuning_times_everything_and_new_runs_take_it(folder: Path) -> None:
    from llmq_nb.train.engine_cuda import compile_kernels
    from tests.train.test_engine_cuda import QWEN2, config_of, run_bits

    config, lines = config_of(), []
    ops = compile_kernels(config, QWEN2, lambda _: None)
    rows = tuning.tune(ops, lines.append)
    products = {str(shape) for shape in ops.products.shapes}
    *of_products, forward, dkdv, dq = (row.name for row in rows)
    assert len(of_products) == len(products) and set(of_products) == products
    assert [forward, dkdv, dq] == [SHAPE.name(kernel) for kernel in KERNELS]
    assert len(lines) == len(rows) and f"timing {len(rows)} of {len(rows)}" in lines[-1]
    assert all(0 < s < 1 for row in rows for s in row.seconds)
    assert machine_tuning(ops.device) == {row.name: row.chosen for row in rows}

    shapes = candidates(SHAPE.D, ops.device.cc)
    other = {SHAPE.name(kernel): max(shapes[kernel]) for kernel in KERNELS}
    keep_machine_tuning(ops.device, other, replace=True)
    losses, weights, saved = run_bits(config, QWEN2)
    assert other.items() <= saved.items()
    keep_machine_tuning(ops.device, dict.fromkeys(other, 0), replace=True)
    resumed = run_bits(config, QWEN2, tuning=saved)
    assert resumed == (losses, weights, saved)


@pytest.mark.gpu
def test_too_little_memory_is_said_before_anything_is_timed(folder: Path) -> None:
    from llmq_nb.core.errors import UserError
    from llmq_nb.train.engine_cuda import compile_kernels
    from tests.train.test_engine_cuda import QWEN2, config_of

    ops = compile_kernels(config_of(), QWEN2, lambda _: None)
    ops.B = 1 << 20
    with pytest.raises(UserError, match="short"):
        tuning.tune(ops, lambda _: None)
    assert list(folder.iterdir()) == []
