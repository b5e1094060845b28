"""adamw: bit for bit the cpu engine (NumPy, other code), and within rounding of float64 equations.

The float64 comparison catches what both engines could have wrong; the bitwise one the rest.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.config import OptimizerConfig
from llmq_nb.core.dtype import DType
from llmq_nb.core.tensor import Tensor
from llmq_nb.kernels import adamw
from llmq_nb.kernels.adamw import adamw_ref
from llmq_nb.model.engine_cpu import optimizer
from llmq_nb.model.ops import Scalars
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

STORAGE = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
STORAGE["e4m3"] = np.dtype(ml_dtypes.float8_e4m3fn)
HYPER: dict[str, float] = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
DECAY, RATE, STEP, SEED, TENSOR = 0.1, 1e-3, 7, 12345, 41
CLIP = np.float32(0.37)
SCALARS = Scalars(RATE, 0.0, 1 - 0.9 ** (STEP + 1), 1 - 0.95 ** (STEP + 1), STEP * 4)


def inputs(n: int, master: str, m: str, v: str, grad: str) -> dict[str, np.ndarray]:
    """A state as training leaves it: gradients over many binades, some of them and of v zero."""
    rng = np.random.default_rng(n)
    scale = 10.0 ** rng.uniform(-9, 1, n)
    g = rng.standard_normal(n) * scale
    g[::13] = 0
    second = (rng.standard_normal(n) * scale) ** 2
    second[::26] = 0
    state = {
        "master": (rng.standard_normal(n) * 0.05).astype(STORAGE[master]),
        "v": second.astype(STORAGE[v]),
        "grad": g.astype(STORAGE[grad]),
        "weight": np.zeros(n, STORAGE["bf16"]),
        "m_scale": np.zeros(-(-n // 128), np.float32),
    }
    first = rng.standard_normal(n) * scale
    if m == "e4m3":
        state["m_scale"] = (10.0 ** rng.uniform(-6, 0, state["m_scale"].size)).astype(np.float32)
        first = rng.uniform(-448, 448, n) * 2.0 ** rng.integers(-14, 1, n)
    state["m"] = first.astype(STORAGE[m])
    return state


def expected(state: dict[str, np.ndarray], copy: bool) -> dict[str, np.ndarray]:
    """The cpu engine's result."""
    after = {name: array.copy() for name, array in state.items()}
    formats = {dtype.numpy: dtype for dtype in DType}
    tensors = {k: Tensor(k, a.shape, formats[a.dtype], a) for k, a in after.items()}
    optimizer.adamw(
        tensors["master"], tensors["weight" if copy else "master"], tensors["m"], tensors["v"],
        tensors["grad"], config=OptimizerConfig(weight_decay=DECAY), scalars=SCALARS, clip=CLIP,
        seed=SEED, tensor_id=TENSOR, decayed=True,
        m_scale=tensors["m_scale"] if state["m"].dtype == STORAGE["e4m3"] else None,
    )  # fmt: skip
    return after


def scalar_buffers(device: Device, finite: float) -> dict[str, int]:
    s = SCALARS
    floats = [s.learning_rate, s.inv_supervised, s.correction1, s.correction2]
    words = np.array(floats, np.float32).view(np.uint32).tolist() + [s.update]
    total = np.array([3.0, CLIP, finite], np.float32)
    return {
        "scalars": device.put(np.array(words, np.uint32)).address,
        "total": device.put(total).address,
    }


def run(
    device: Device, state: dict[str, np.ndarray], formats: dict[str, str], copy: bool,
    finite: float = 1.0, cuts: tuple[int, ...] = (),
) -> tuple[dict[str, np.ndarray], float]:  # fmt: skip
    n = state["master"].size
    b = {name: device.put(array) for name, array in state.items()}
    slot, scalars = device.zeros((1,), np.float32), scalar_buffers(device, finite)

    def at(name: str, element: int) -> int:
        return b[name].address + element * state[name].dtype.itemsize

    kinds: dict[str, Any] = {f"{name}_dtype": kind for name, kind in formats.items()}
    edges = (0, *cuts, n)
    for begin, end in zip(edges, edges[1:], strict=False):
        adamw.adamw_launch(
            at("master", begin), at("weight", begin) if copy else 0, at("m", begin),
            at("v", begin), at("grad", begin), n=end - begin, first=begin,
            m_scale=at("m_scale", begin // 128), absmax=slot.address, decay=DECAY, seed=SEED,
            tensor=TENSOR, **HYPER, **scalars, stream=device.stream,
            **kinds,
        )  # fmt: skip
    return {name: buffer.numpy() for name, buffer in b.items()}, float(slot.numpy()[0])


def check(
    device: Device, n: int, master: str, m: str, v: str, grad: str, copy: bool,
    cuts: tuple[int, ...] = (),
) -> None:  # fmt: skip
    formats = {"master": master, "m": m, "v": v, "grad": grad}
    state = inputs(n, **formats)
    got, absmax = run(device, state, formats, copy, cuts=cuts)
    want = expected(state, copy)
    for name in want:
        np.testing.assert_array_equal(
            got[name].view(np.uint8), want[name].view(np.uint8), err_msg=f"{name} {formats}"
        )
    weight = want["weight" if copy else "master"].astype(np.float32)
    assert absmax == np.abs(weight).max()
    if m == "e4m3":
        return
    p, m64, v64 = adamw_ref(
        state["master"], state["m"], state["v"], state["grad"], rate=RATE, decay=DECAY, step=STEP,
        clip=float(CLIP), **HYPER,
    )  # fmt: skip
    # stochastic rounding is off by less than two ulp halves; 1 - beta2 and the corrections carry
    # the relative error of a float32 subtraction from 1: 2^-24 / 0.05
    ulp = {"fp32": 0.0, "bf16": 2 * U16}
    slack = 24 * U32 + 8 * U32 / 0.05
    g64 = np.abs(float(CLIP) * state["grad"].astype(np.float64))
    size_m = np.abs(state["m"].astype(np.float64)) + g64
    assert_within(got["m"], m64, relative=ulp[m], absolute=slack * size_m + 1e-37, what="m")
    assert_within(got["v"], v64, relative=ulp[v] + slack, absolute=1e-37, what="v")
    # the update is at most |m_hat| / sqrt(v_hat), its error that of m over the same root
    root = np.sqrt(v64 / SCALARS.correction2) + HYPER["epsilon"]
    step = RATE * (size_m / SCALARS.correction1 / root * slack + 4 * U32 * np.abs(p))
    bound = ulp[master] * np.abs(p) + step + 2 * U32 * np.abs(p)
    assert_within(got["master"], p, absolute=bound, what="master")


def check_not_finite(device: Device, master: str, m: str, v: str, copy: bool, n: int) -> None:
    """Nothing is written but the absmax, from a cleared slot: that of the old weight."""
    formats = {"master": master, "m": m, "v": v, "grad": "bf16"}
    state = inputs(n, **formats)
    state["weight"] = state["master"].astype(STORAGE["bf16"])
    state["grad"][3] = np.nan
    got, absmax = run(device, state, formats, copy, finite=0.0)
    for name, array in state.items():
        np.testing.assert_array_equal(got[name].view(np.uint8), array.view(np.uint8))
    kept = state["weight" if copy else "master"]
    assert absmax == np.abs(kept.astype(np.float32)).max()


def check_quotients(device: Device, n: int, step: int) -> None:
    """(m / c1) / (sqrt(v / c2) + epsilon) is NumPy's for every mantissa of v (step 1), for random
    m, and for what overflows, vanishes or is no number."""
    rng = np.random.default_rng(n)
    v = (np.uint32(0x3F000000) + step * np.arange(n, dtype=np.uint32)).view(np.float32)
    m = (rng.uniform(1, 2, n) * 2.0 ** rng.integers(-60, 60, n)).astype(np.float32)
    m[:64] = np.resize(np.array([0, 1, -2.5, 1e-25, 3e38, -3e38, np.inf, np.nan], np.float32), 64)
    v[:64] = np.repeat(np.array([0, 1, 1e-25, 3e38, np.inf, np.nan, 2.0**-99, 0.5], np.float32), 8)
    c1, c2, epsilon = np.float32(0.37), np.float32(0.81), np.float32(1e-8)
    words = np.array([1.0, 0.0, c1, c2], np.float32).view(np.uint32).tolist() + [0]
    master, grad = device.zeros((n,), np.float32), device.zeros((n,), np.float32)
    adamw.adamw_launch(
        master.address, 0, device.put(m).address, device.put(v).address, grad.address, n=n,
        scalars=device.put(np.array(words, np.uint32)).address,
        total=device.put(np.ones(3, np.float32)).address, beta1=1.0, beta2=1.0,
        epsilon=float(epsilon), decay=0.0, seed=0, tensor=0, grad_dtype="fp32",
        stream=device.stream,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        want = -((m / c1) / (np.sqrt(v / c2) + epsilon))
    np.testing.assert_array_equal(master.numpy(), want)


def check_user_function(device: Device) -> None:
    state = inputs(77, "fp32", "fp32", "fp32", "bf16")
    b = {name: device.put(array) for name, array in state.items()}
    arrays = [b[name].array() for name in ("master", "m", "v", "grad")]
    adamw.update(
        *arrays, step=STEP, learning_rate=RATE, weight_decay=DECAY, weight=b["weight"].array()
    )
    p, m64, v64 = adamw_ref(
        *(state[name] for name in ("master", "m", "v", "grad")), rate=RATE, decay=DECAY, step=STEP,
        **HYPER,
    )  # fmt: skip
    assert_within(b["master"].numpy(), p, relative=1e-5, absolute=1e-7)
    assert_within(b["m"].numpy(), m64, relative=1e-5, absolute=1e-6 * np.abs(m64).max())
    assert_within(b["v"].numpy(), v64, relative=1e-5)
    np.testing.assert_array_equal(b["weight"].numpy(), b["master"].numpy().astype(STORAGE["bf16"]))
    wrong: Any = device.put(np.zeros(5, np.float32)).array()
    with pytest.raises(ValueError, match="grad has shape"):
        adamw.update(arrays[0], arrays[1], arrays[2], wrong, step=0, learning_rate=RATE)


FORMATS = [
    ("fp32", "fp32", "fp32", "bf16", True),
    ("fp32", "bf16", "bf16", "fp32", True),
    ("fp32", "fp32", "fp32", "fp32", False),
    ("bf16", "bf16", "bf16", "bf16", False),
    ("bf16", "e4m3", "bf16", "bf16", False),
    ("fp32", "e4m3", "fp32", "bf16", True),
]


# 1: a tail alone; 1541 = 12 groups of 128 and 5; 2061: a second block
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_update_simulated(formats: tuple[str, str, str, str, bool]) -> None:
    run_sim(check, n=1541, **dict(zip(("master", "m", "v", "grad", "copy"), formats, strict=True)))


def test_sizes_and_shards_simulated() -> None:
    bf16 = {"master": "bf16", "m": "bf16", "v": "bf16", "grad": "bf16", "copy": False}
    run_sim(check, n=1, **bf16)
    run_sim(check, n=2061, cuts=(1024,), **bf16)
    run_sim(check, n=1100, cuts=(1024,), **{**bf16, "m": "e4m3"})


NOT_FINITE: list[dict[str, Any]] = [
    {"master": "fp32", "m": "fp32", "v": "fp32", "copy": True, "n": 100},
    {"master": "fp32", "m": "fp32", "v": "fp32", "copy": False, "n": 2061},
    {"master": "bf16", "m": "bf16", "v": "bf16", "copy": False, "n": 2061},
    {"master": "bf16", "m": "e4m3", "v": "bf16", "copy": False, "n": 1100},
    {"master": "fp32", "m": "e4m3", "v": "fp32", "copy": True, "n": 13},
]


@pytest.mark.parametrize("case", NOT_FINITE, ids=str)
def test_not_finite_simulated(case: dict[str, Any]) -> None:
    run_sim(check_not_finite, **case)


def test_quotients_simulated() -> None:
    run_sim(check_quotients, n=2048, step=8191)


def test_user_function_simulated() -> None:
    run_sim(check_user_function)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("n", [1, 4101, 1_000_003])
def test_update(gpu: Device, formats: tuple[str, str, str, str, bool], n: int) -> None:
    check(gpu, n, *formats, cuts=(2048,) if n > 4000 else ())


@pytest.mark.gpu
def test_not_finite_and_user_function(gpu: Device) -> None:
    for case in NOT_FINITE:
        check_not_finite(gpu, **case)
    check_user_function(gpu)


@pytest.mark.gpu
def test_quotients_of_every_mantissa(gpu: Device) -> None:
    check_quotients(gpu, n=1 << 24, step=1)  # two binades: even and odd exponents
