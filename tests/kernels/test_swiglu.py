"""swiglu against float64 NumPy; bounds are the kernel docstring's error model, absmax is exact."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import swiglu
from llmq_nb.kernels.quantize import quantize_transpose_launch
from llmq_nb.kernels.swiglu import swiglu_backward_ref, swiglu_forward_ref
from tests.kernels.harness import U16, U32, Buffer, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": 0.0}
TINY = 2.0**-125  # sigmoid below it is flushed to zero
FLUSHED = 2.0**-126  # and so are results below the least normal float32


def random(seed: int, shape: tuple[int, ...], dtype: str, magnitude: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * magnitude).astype(DTYPES[dtype])


def check_forward(
    device: Device, N: int, F: int, dtype: str = "bf16", magnitude: float = 3.0
) -> None:
    gate_up = random(0, (N, 2 * F), dtype, magnitude)
    y, absmax = device.empty((N, F), DTYPES[dtype]), device.zeros((1,), np.float32)
    swiglu.swiglu_forward_launch(
        y.address, device.put(gate_up).address, rows=N, F=F, absmax=absmax.address, dtype=dtype,
        stream=device.stream,
    )  # fmt: skip
    gate, up = np.split(np.abs(gate_up.astype(np.float64)), 2, axis=-1)
    bound = (1.25 * gate + 8) * U32 + ROUNDING[dtype]
    assert_within(
        y.numpy(), swiglu_forward_ref(gate_up), relative=bound, absolute=TINY * gate * up, what="y"
    )
    assert absmax.numpy()[0] == np.abs(y.numpy().astype(np.float32)).max()


def check_backward(
    device: Device, N: int, F: int, dtype: str = "bf16", magnitude: float = 3.0
) -> None:
    gate_up, dy = random(1, (N, 2 * F), dtype, magnitude), random(2, (N, F), dtype, 1.0)
    dgate_up, absmax = device.empty((N, 2 * F), DTYPES[dtype]), device.zeros((1,), np.float32)
    swiglu.swiglu_backward_launch(
        dgate_up.address, device.put(dy).address, device.put(gate_up).address, rows=N, F=F,
        absmax=absmax.address, dtype=dtype, stream=device.stream,
    )  # fmt: skip
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    dy64, size, s = dy.astype(np.float64), np.abs(gate), 1 / (1 + np.exp(-gate))
    dgate = (1.25 * size + 14) * U32 * np.abs(dy64 * up) * s * (1 + size)
    dup = (1.25 * size + 8) * U32 * np.abs(dy64 * gate) * s
    tiny = TINY * np.abs(dy64) * (1 + size) * (1 + np.abs(up)) + FLUSHED
    bound = np.concatenate([dgate + tiny, dup + tiny], axis=-1)
    expected = swiglu_backward_ref(dy, gate_up)
    assert_within(
        dgate_up.numpy(), expected, relative=ROUNDING[dtype], absolute=bound, what="dgate_up"
    )
    assert absmax.numpy()[0] == np.abs(dgate_up.numpy().astype(np.float32)).max()


def check_backward_in_place(device: Device) -> None:
    gate_up, dy = (
        device.put(random(1, (3, 64), "bf16", 2.0)),
        device.put(random(2, (3, 32), "bf16", 1.0)),
    )
    out = device.empty((3, 64), DTYPES["bf16"])
    for target in (out, gate_up):
        swiglu.swiglu_backward_launch(
            target.address, dy.address, gate_up.address, rows=3, F=32, stream=device.stream
        )
    np.testing.assert_array_equal(out.numpy().view(np.uint16), gate_up.numpy().view(np.uint16))


def check_quantize(
    device: Device, N: int, F: int, format: str, hardware: bool, magnitude: float = 3.0
) -> None:
    """Bit for bit forward, then quantize_transpose with forward's absmax; each output alone too."""
    gate_up = device.put(random(5, (N, 2 * F), "bf16", magnitude))
    y, slot = device.empty((N, F), DTYPES["bf16"]), device.zeros((4,), np.float32)
    scale, absmax = slot.address, slot.address + 4
    swiglu.swiglu_forward_launch(
        y.address, gate_up.address, rows=N, F=F, absmax=absmax, stream=device.stream
    )

    def outputs() -> list[Buffer]:
        return [device.empty((N, F), np.uint8), device.empty((F, N + -N % 16), np.uint8)]

    expected, common = outputs(), {"format": format, "hardware": hardware, "stream": device.stream}
    quantize_transpose_launch(
        expected[0].address, expected[1].address, scale, y.address, absmax, R=N, C=F, **common
    )
    expected_scale = slot.numpy()[0]
    for asked in ((True, True), (True, False), (False, True)):
        got = outputs()
        q, q_t = (b.address if a else 0 for a, b in zip(asked, got, strict=True))
        swiglu.swiglu_quantize_launch(q, q_t, scale, gate_up.address, absmax, rows=N, F=F, **common)
        for a, b, e in zip(asked, got, expected, strict=True):
            np.testing.assert_array_equal(b.numpy(), e.numpy() if a else np.full(e.shape, 0xFF))
        assert slot.numpy()[0] == expected_scale
    codes = expected[0].numpy()
    assert len(np.unique(codes)) > min(codes.size, 100) // 4  # not all alike


def check_user_functions(device: Device) -> None:
    gate_up, dy = random(3, (2, 3, 32), "bf16", 1.0), random(4, (2, 3, 16), "bf16", 1.0)
    y = swiglu.forward(device.put(gate_up).array())
    dgate_up = swiglu.backward(device.put(dy).array(), device.put(gate_up).array())
    y, dgate_up = (a if isinstance(a, np.ndarray) else a.numpy() for a in (y, dgate_up))
    assert_within(y, swiglu_forward_ref(gate_up), relative=1.01 * U16)
    expected = swiglu_backward_ref(dy, gate_up)
    assert_within(dgate_up, expected, relative=1.01 * U16, absolute=2.0**-18)
    with pytest.raises(ValueError, match="multiple of 16"):
        swiglu.forward(device.put(np.zeros((2, 24), DTYPES["bf16"])).array())
    with pytest.raises(ValueError, match=r"dy has shape \(2, 3, 32\), must be \(2, 3, 16\)"):
        swiglu.backward(device.put(gate_up).array(), device.put(gate_up).array())


# 8: one piece a row; 264 rows of 16: several blocks with a ragged end
@pytest.mark.parametrize(("N", "F"), [(1, 8), (264, 16)])
def test_simulated(N: int, F: int) -> None:
    run_sim(check_forward, N=N, F=F)
    run_sim(check_backward, N=N, F=F)


@pytest.mark.parametrize("magnitude", [1e-3, 60.0])  # 60: sigmoid underflows
def test_scales_simulated(magnitude: float) -> None:
    run_sim(check_forward, N=3, F=64, magnitude=magnitude)
    run_sim(check_backward, N=3, F=64, magnitude=magnitude)


def test_fp32_simulated() -> None:
    run_sim(check_forward, N=3, F=24, dtype="fp32")
    run_sim(check_backward, N=3, F=24, dtype="fp32")


def test_in_place_simulated() -> None:
    run_sim(check_backward_in_place)


def test_user_functions_simulated() -> None:
    run_sim(check_user_functions)


# 17: padding; 130 x 144: tails of a second tile both ways
@pytest.mark.parametrize(
    ("N", "F", "format", "hardware"),
    [(1, 16, "e4m3", True), (17, 48, "e5m2", False), (130, 144, "e4m3", True)],
)
def test_quantize_simulated(N: int, F: int, format: str, hardware: bool) -> None:
    run_sim(check_quantize, N=N, F=F, format=format, hardware=hardware)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "F"), [(1, 16), (17, 48), (1001, 4864), (77, 8960), (16, 18944)])
@pytest.mark.parametrize("hardware", [True, False], ids=["hardware", "software"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_quantize(gpu: Device, N: int, F: int, hardware: bool, format: str) -> None:
    check_quantize(gpu, N, F, format, hardware)
    check_quantize(gpu, N, F, format, hardware, magnitude=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "F"), [(1, 8), (1001, 4864), (77, 8960), (16, 18944)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("magnitude", [1e-3, 3.0, 60.0])
def test_both(gpu: Device, N: int, F: int, dtype: str, magnitude: float) -> None:
    check_forward(gpu, N, F, dtype, magnitude)
    check_backward(gpu, N, F, dtype, magnitude)


@pytest.mark.gpu
def test_in_place(gpu: Device) -> None:
    check_backward_in_place(gpu)


@pytest.mark.gpu
def test_user_functions(gpu: Device) -> None:
    check_user_functions(gpu)
