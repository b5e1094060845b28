"""Offload on the GPU: the bits of a run that keeps everything, whatever is moved, and real places.

Needs a GPU. Graphs are demanded (`cuda_graphs = true`): a copy that is not joined at the end of a
step, or an event from outside it, makes the capture fail.
"""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from llmq_nb.core.device import DeviceError, check, driver, open_device
from llmq_nb.core.errors import UserError
from llmq_nb.core.pinned import WRITE_COMBINED
from llmq_nb.model.config import ModelConfig
from llmq_nb.offload import pinned
from llmq_nb.plan import places
from llmq_nb.train.gradients import loss_and_gradients
from tests.train.test_engine_cuda import batch_of, config_of, cuda_engine

pytestmark = pytest.mark.gpu
MODEL = ModelConfig(
    family="qwen2", C=256, F=384, L=5, H=4, G=2, D=64, V=1003, tied=True, qkv_bias=True
)
LEVERS = ("m", "v", "master", "quants", "gradients", "residual")
STORAGE: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, fp32 master": {"master": "fp32"},
    "e4m3, kept quants": {"matmul": "e4m3", "m": "e4m3"},
    "e4m3, no quants": {"matmul": "e4m3", "m": "e4m3", "keep_quants": False},
    "e4m3, bf16 ends": {"matmul": "e4m3", "m": "e4m3", "layers": (0, -1)},
}
RECOMPUTE = [(), ("block",), ("norm", "swiglu"), ("qkv", "ffn")]


def offload_config(
    storage: str,
    offload: Any = (),
    transfer: Any = "auto",
    recompute=(),
    accumulation=2,
    graphs=True,
):
    s = STORAGE[storage]
    config = config_of(T=96, B=1, accumulation=accumulation, recompute=recompute, graphs=graphs)
    p, o, m = config.precision, config.optimizer, config.memory
    return dataclasses.replace(
        config,
        precision=dataclasses.replace(p, matmul=s.get("matmul"), bf16_layers=s.get("layers", ())),
        optimizer=dataclasses.replace(o, master=s.get("master", "bf16"), m=s.get("m", "bf16")),
        memory=dataclasses.replace(
            m, offload=tuple(offload), transfer=transfer, keep_quants=s.get("keep_quants", True)
        ),
    )


@pytest.fixture(autouse=True)
def several_slices(monkeypatch):
    monkeypatch.setattr(places, "SLICE", 1 << 16)
    monkeypatch.setattr("llmq_nb.train.host_stores.STREAMED", 1 << 10)


def run(config, tuning=None):
    """Losses, norms, an evaluation between the steps, and the whole state, as bits."""
    engine = cuda_engine(config, MODEL, tuning)
    results = []
    for step in range(2):
        batch = batch_of(config, MODEL, seed=step)
        one = batch.tokens[0, 0], batch.targets[0, 0], batch.segment_start[0, 0]
        r = engine.train_step(batch, step=step, updates=step, learning_rate=1e-2)
        assert all(store.idle for store in engine.ranks[0].host_stores)
        results.append((r.loss, r.grad_norm, r.lse_max, engine.evaluate(*one)))
    state = []
    for s in engine.states:
        found = (s.master, s.weight, s.m, s.m_scale, s.v, s.gradient)
        state += [engine.read(t).tobytes() for t in found if t is not None]
    tuning = engine.tuning
    engine.close()
    return (results, state), tuning


@cache
def resident(storage: str, accumulation: int):
    return run(offload_config(storage, accumulation=accumulation))


@pytest.mark.parametrize("storage", STORAGE)
def test_each_lever_alone_and_all_together(storage):
    want, tuning = resident(storage, 2)
    assert all(np.isfinite(x) for r in want[0] for x in r)
    for lever in LEVERS:
        found, _ = run(offload_config(storage, [lever], "zero_copy"), tuning)
        assert found == want, lever
    for transfer in ("zero_copy", "copy"):
        found, _ = run(offload_config(storage, LEVERS, transfer), tuning)
        assert found == want, transfer


def test_random_subsets_with_recomputation():
    rng = np.random.default_rng(7)
    for index in range(20):
        subset = [lever for lever in LEVERS if rng.random() < 0.5]
        storage, accumulation = list(STORAGE)[index % 5], (1, 2, 5)[index % 3]
        recompute, transfer = RECOMPUTE[index % 4], ("zero_copy", "copy")[index // 2 % 2]
        want, tuning = resident(storage, accumulation)
        config = offload_config(
            storage, subset, transfer, recompute, accumulation, graphs=index % 4 != 3
        )
        found, _ = run(config, tuning)
        assert found == want, (subset, storage, recompute, transfer)


def test_graphs_replayed_in_any_order_give_what_they_gave():
    config = offload_config("e4m3, no quants", LEVERS, "copy", accumulation=4)
    engine = cuda_engine(config, MODEL)
    batch = batch_of(config, MODEL)
    one = batch.tokens[0, 0], batch.targets[0, 0], batch.segment_start[0, 0]
    before = engine.evaluate(*one)
    first = engine.train_step(batch, step=0, updates=0, learning_rate=0.0)
    for _ in range(3):
        assert engine.evaluate(*one) == before  # a learning rate of 0 changes nothing
        again = engine.train_step(batch, step=0, updates=0, learning_rate=0.0)
        assert (again.loss, again.grad_norm) == (first.loss, first.grad_norm)
    engine.close()


def memory_type(address: int) -> int:
    attribute = driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    return int(check(driver().cuPointerGetAttribute(attribute, address), "asking for a place"))


def test_buffers_lie_where_the_plan_says_and_nothing_more_is_pinned():
    config = offload_config("e4m3, kept quants", LEVERS)
    engine = cuda_engine(config, MODEL)
    for b in engine.plan.buffers:
        kinds = {"host": 1, "device": 2}  # CU_MEMORYTYPE_HOST, _DEVICE
        assert memory_type(engine.tensors[b.name].data) == kinds[b.place], b.name
    pinned = engine.host.nbytes + sum(slot.memory.nbytes for slot in engine.seats[0].ring.slots)
    assert engine.plan.host_total <= pinned <= 1.02 * engine.plan.host_total
    for state in engine.states:  # what a checkpoint reads and writes
        value = np.random.default_rng(1).standard_normal(state.v.shape).astype(np.float32)
        engine.write(state.v, value)
        np.testing.assert_array_equal(engine.read(state.v), value.astype(state.v.dtype.numpy))
    engine.close()


@pytest.mark.parametrize("way", ["registered", "allocated", "write_combined"])
def test_host_memory_is_zeros_that_the_device_reads(way, monkeypatch):
    """All ways to pin: registered pages, the driver's allocation where it refuses them, and that
    past the host's caches."""
    if way == "allocated":

        def refuse(nbytes: int) -> pinned.Registered:
            raise DeviceError("CUDA_ERROR_NOT_SUPPORTED", "refused")

        monkeypatch.setattr(pinned, "Registered", refuse)
    open_device()
    sizes = [(0, 5 << 20), (5 << 20, 6 << 20)]
    memory = pinned.HostMemory(sizes, write_combined=way == "write_combined")
    assert memory.nbytes == pytest.approx(6 << 20, abs=1024)
    for offset in (0, (5 << 20) - 4096, 5 << 20, (6 << 20) - 4096):
        address = memory.address(offset)
        assert memory_type(address) == 1
        found = np.ones(4096, np.uint8)
        check(driver().cuMemcpyDtoH(found.ctypes.data, address, 4096), "reading")
        assert not found.any()
        flags = check(driver().cuMemHostGetFlags(address), "asking for the flags")
        assert bool(int(flags) & WRITE_COMBINED) == (way == "write_combined")
    memory.close()


@pytest.mark.parametrize("storage", STORAGE)
def test_states_on_the_disk_keep_the_bits(storage, monkeypatch, tmp_path):
    """m, v or both; the update is launched, the micro-steps are graphs."""
    monkeypatch.setattr(places, "STREAMED", 1 << 10)
    monkeypatch.chdir(tmp_path)
    want, tuning = resident(storage, 2)
    for states in (("m",), ("v",), ("m", "v")):
        config = offload_config(storage, [x for x in LEVERS if x not in states], "copy")
        memory = dataclasses.replace(config.memory, disk=states)
        found, _ = run(dataclasses.replace(config, memory=memory), tuning)
        assert found == want, states
    assert not list(tmp_path.iterdir())


def test_write_combined_memory_keeps_the_bits():
    want, tuning = resident("e4m3, kept quants", 2)
    config = offload_config("e4m3, kept quants", LEVERS)
    memory = dataclasses.replace(config.memory, write_combined=True)
    found, _ = run(dataclasses.replace(config, memory=memory), tuning)
    assert found == want


@pytest.mark.parametrize("storage", ["bf16", "e4m3, kept quants", "e4m3, no quants"])
def test_ranks_that_share_weights_on_the_host(storage):
    found = []
    for offload in ((), ("master",), LEVERS):
        config = offload_config(storage, offload)
        engine = cuda_engine(config, MODEL, resident(storage, 2)[1])
        batch = batch_of(config, MODEL)
        tokens, targets = batch.tokens[0, 0], batch.targets[0, 0]
        loss, gradients = loss_and_gradients(config, MODEL, engine, tokens, targets)
        found.append((loss, {name: g.tobytes() for name, g in gradients.items()}))
        engine.close()
    assert found[1] == found[0] and found[2] == found[0]


def test_limits_are_refused_in_one_line():
    config = offload_config("bf16", LEVERS)
    for key, value in (("device_limit", "600MiB"), ("host_limit", "1MiB")):
        memory = dataclasses.replace(config.memory, **{key: value})
        with pytest.raises(UserError) as error:
            cuda_engine(dataclasses.replace(config, memory=memory), MODEL)
        text = str(error.value)
        assert f"memory.{key}" in text and "short" in text and "\n" not in text
