"""adamw against float64 NumPy.

Stochastic rounding with known bits is monotone, so a stored value must lie between the reference
value minus and plus the error bound, each rounded with the same bits: nearly always one single
value.
"""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import adamw
from llmq_nb.kernels.adamw import adamw_ref, scalars_of
from llmq_nb.kernels.random import Purpose, random_bits_ref, round_stochastic_ref
from tests.kernels.harness import U32, Device, run_sim

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"bf16": BF16, "fp32": np.dtype(np.float32)}
HYPER = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
FLUSHED = 2.0**-125  # fast math flushes subnormal float32
RATE, STEP, SEED, TENSOR, CLIP = 3e-3, 7, 11, 5, 0.5


def state(n: int, dtypes: dict[str, str]) -> dict[str, np.ndarray]:
    """Weights, gradient and moments of a run in progress; the first piece is all zeros."""
    rng = np.random.default_rng(n)
    values = {
        "master": rng.standard_normal(n) * 0.05,
        "m": rng.standard_normal(n) * 1e-3,
        "v": rng.standard_normal(n) ** 2 * 1e-6,
        "grad": rng.standard_normal(n) * 10.0 ** rng.integers(-8, 1, n),
    }
    for x in values.values():
        x[:8] = 0.0
    return {name: x.astype(DTYPES[dtypes[name]]) for name, x in values.items()}


def launch(
    device: Device, buffers, dtypes: dict[str, str], *, weights, norm, absmax, cut=None
) -> None:
    scalars = device.put(scalars_of(learning_rate=RATE, beta1=0.9, beta2=0.95, step=STEP))
    n = buffers["master"].shape[0]
    begin, end = cut or (0, n)
    addresses = [
        buffers[name].address + begin * DTYPES[dtypes[name]].itemsize
        for name in ("master", "m", "v", "grad")
    ]
    adamw.adamw_launch(
        addresses[0], weights.address + 2 * begin if weights else 0, *addresses[1:],
        scalars=scalars.address, norm=norm.address, n=end - begin, start=begin, seed=SEED,
        tensor=TENSOR, absmax=absmax.address if absmax else 0, master_dtype=dtypes["master"],
        m_dtype=dtypes["m"], v_dtype=dtypes["v"], grad_dtype=dtypes["grad"], stream=device.stream,
        **HYPER,
    )  # fmt: skip


def check_stored(actual, expected, bound, dtype: str, purpose: Purpose, what: str) -> None:
    low, high = expected - bound, expected + bound
    if dtype == "bf16":
        bits = random_bits_ref(SEED, purpose, actual.size, TENSOR, STEP)
        low, high = (round_stochastic_ref(x.astype(np.float32), bits) for x in (low, high))
        low, high = np.minimum(low, high), np.maximum(low, high)
        single = (low == high).mean()
        assert single > 0.95, f"{what}: the bound decides only {single:.0%} of the values"
    a, low, high = (x.astype(np.float64) for x in (actual, low, high))
    bad = ~((low <= a) & (a <= high))
    assert not bad.any(), (
        f"{what}: {bad.sum()} outside, first at {bad.argmax()}: {a[bad][0]} "
        f"not in [{low[bad][0]}, {high[bad][0]}]"
    )


def check_step(device: Device, n: int, dtypes: dict[str, str]) -> None:
    before = state(n, dtypes)
    buffers = {name: device.put(x) for name, x in before.items()}
    weights, absmax = device.empty((n,), BF16), device.zeros((1,), np.float32)
    norm = device.put(np.array([9.0, CLIP, 1.0], np.float32))
    launch(device, buffers, dtypes, weights=weights, norm=norm, absmax=absmax)
    after = {name: b.numpy() for name, b in buffers.items()}
    p, m, v = adamw_ref(
        before["master"], before["m"], before["v"], before["grad"], clip=CLIP, learning_rate=RATE,
        step=STEP, **HYPER,
    )  # fmt: skip
    g = np.abs(before["grad"].astype(np.float64)) * CLIP
    old_p, old_m, old_v = (np.abs(before[k].astype(np.float64)) for k in ("master", "m", "v"))
    m_bound, v_bound = 4 * U32 * (old_m + g), 5 * U32 * (old_v + g**2)
    # sensitivity of the update to m and v, then its own roundings and approximations (2^-20)
    root = np.sqrt(v / (1 - 0.95**STEP)) + 1e-8
    m_hat = np.abs(m) / (1 - 0.9**STEP)
    change = m_hat / root
    from_m = m_bound / (1 - 0.9**STEP) / root
    from_v = change * v_bound / (2 * np.maximum(v, 1e-300))
    p_bound = 3 * U32 * old_p + RATE * (2.0**-20 * (change + 0.1 * old_p) + from_m + from_v)
    check_stored(after["m"], m, m_bound + FLUSHED, dtypes["m"], Purpose.M, "m")
    check_stored(after["v"], v, v_bound + FLUSHED, dtypes["v"], Purpose.V, "v")
    check_stored(after["master"], p, p_bound, dtypes["master"], Purpose.MASTER, "master")
    copied = after["master"].astype(BF16)
    np.testing.assert_array_equal(weights.numpy().view(np.uint16), copied.view(np.uint16))
    assert absmax.numpy()[0] == np.abs(copied.astype(np.float32)).max()
    np.testing.assert_array_equal(after["grad"], before["grad"])


def check_not_finite_changes_nothing(device: Device, dtypes: dict[str, str]) -> None:
    before = state(64, dtypes)
    before["grad"][3] = np.nan
    buffers = {name: device.put(x) for name, x in before.items()}
    weights, absmax = device.empty((64,), BF16), device.zeros((1,), np.float32)
    norm = device.put(np.array([np.nan, np.nan, 0.0], np.float32))
    launch(device, buffers, dtypes, weights=weights, norm=norm, absmax=absmax)
    for name, b in buffers.items():
        assert b.numpy().tobytes() == before[name].tobytes(), name
    assert (weights.numpy().view(np.uint16) == 0xFFFF).all()
    expected = np.abs(before["master"].astype(BF16).astype(np.float32)).max()
    assert absmax.numpy()[0] == expected  # the old weights still need their scale


def check_shards_agree(device: Device, dtypes: dict[str, str]) -> None:
    """Three launches over parts write the bits of one."""
    before, results = state(88, dtypes), []
    norm = device.put(np.array([9.0, CLIP, 1.0], np.float32))
    for cuts in ((0, 88), (0, 24, 64, 88)):
        buffers = {name: device.put(x) for name, x in before.items()}
        for cut in zip(cuts, cuts[1:], strict=False):
            launch(device, buffers, dtypes, weights=None, norm=norm, absmax=None, cut=cut)
        results.append([b.numpy().tobytes() for b in buffers.values()])
    assert results[0] == results[1]


def check_user_function(device: Device) -> None:
    dtypes = {"master": "bf16", "m": "fp32", "v": "fp32", "grad": "bf16"}
    before = state(64, dtypes)
    buffers = {name: device.put(x) for name, x in before.items()}
    arrays = [buffers[k].array() for k in ("master", "m", "v", "grad")]
    adamw.update(*arrays, learning_rate=RATE, weight_decay=0.1, step=STEP)
    p, m, _ = adamw_ref(
        before["master"], before["m"], before["v"], before["grad"], clip=1.0, learning_rate=RATE,
        step=STEP, **HYPER,
    )  # fmt: skip
    error = np.abs(buffers["master"].numpy().astype(np.float64) - p)
    assert (error <= 2.0**-7 * np.abs(p) + 1e-12).all()  # one ulp: rounding up or down
    assert np.abs(buffers["m"].numpy() - m).max() <= 2.0**-20
    with pytest.raises(ValueError, match="step is 0"):
        adamw.update(*arrays, learning_rate=RATE, step=0)


FORMATS = [
    {"master": "bf16", "m": "fp32", "v": "fp32", "grad": "bf16"},
    {"master": "fp32", "m": "fp32", "v": "fp32", "grad": "bf16"},
    {"master": "bf16", "m": "bf16", "v": "bf16", "grad": "bf16"},
    {"master": "fp32", "m": "bf16", "v": "fp32", "grad": "fp32"},
]


@pytest.mark.parametrize("dtypes", FORMATS, ids=lambda d: "-".join(d.values()))
def test_step_simulated(dtypes: dict[str, str]) -> None:
    run_sim(check_step, n=1096, dtypes=dtypes)


def test_not_finite_changes_nothing_simulated() -> None:
    run_sim(check_not_finite_changes_nothing, dtypes=FORMATS[0])
    run_sim(check_not_finite_changes_nothing, dtypes=FORMATS[3])


def test_shards_agree_simulated() -> None:
    run_sim(check_shards_agree, dtypes=FORMATS[2])


def test_user_function_simulated() -> None:
    run_sim(check_user_function)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", FORMATS, ids=lambda d: "-".join(d.values()))
@pytest.mark.parametrize("n", [8, 1096, 1_000_008])
def test_step(gpu: Device, n: int, dtypes: dict[str, str]) -> None:
    check_step(gpu, n, dtypes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", FORMATS, ids=lambda d: "-".join(d.values()))
def test_flags_and_shards(gpu: Device, dtypes: dict[str, str]) -> None:
    check_not_finite_changes_nothing(gpu, dtypes)
    check_shards_agree(gpu, dtypes)
    check_user_function(gpu)
