"""rope against float64 NumPy with the same float32 tables; bound: the kernel docstring's error
model."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import rope
from llmq_nb.kernels.rope import rope_ref
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": 0.0}


def tables(T: int, D: int) -> tuple[np.ndarray, np.ndarray]:
    angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def starts(B: int, T: int) -> np.ndarray:
    """Row 0 is one document; later rows are cut at T / 3 and T / 2."""
    start = np.zeros((B, T), np.int32)
    start[1:, T // 3 :], start[1:, T // 2 :] = T // 3, T // 2
    return start


def check(
    device: Device, B: int, T: int, H: int, G: int, D: int, backward: bool, dtype: str = "bf16"
) -> None:
    rng = np.random.default_rng(B * T)
    qkv = rng.standard_normal((B, T, (H + 2 * G) * D)).astype(DTYPES[dtype])
    (cos, sin), start = tables(T + 3, D), starts(B, T)
    buffer = device.put(qkv)
    launch = rope.rope_backward_launch if backward else rope.rope_forward_launch
    slot = device.zeros((1,), np.float32)
    largest = {"absmax": slot.address} if backward else {}
    launch(
        buffer.address, device.put(cos).address, device.put(sin).address, device.put(start).address,
        rows=B * T, T=T, H=H, G=G, D=D, dtype=dtype, stream=device.stream, **largest,
    )  # fmt: skip
    expected = rope_ref(qkv, cos, sin, start, H, G, backward=backward)
    size = rope_ref(np.abs(qkv), np.abs(cos), np.abs(sin), start, H, G)  # |a cos| + |b sin| below
    size = np.abs(size) + 2 * np.abs(qkv.astype(np.float64))
    result = buffer.numpy()
    assert_within(result, expected, relative=ROUNDING[dtype], absolute=3 * U32 * size)
    if backward:
        assert slot.numpy()[0] == np.abs(result.astype(np.float32)).max()
    values = (H + G) * D  # value heads are untouched
    np.testing.assert_array_equal(
        result[..., values:].view(np.uint8), qkv[..., values:].view(np.uint8)
    )


def check_absmax(device: Device, largest: str) -> None:
    """Of a value head's element, of the last query row's, and without one that was wanted."""
    B, T, H, G, D = 1, 3, 2, 1, 32
    (cos, sin), start = tables(T, D), starts(B, T)
    common = [device.put(a).address for a in (cos, sin, start)]
    qkv = np.full((B, T, (H + 2 * G) * D), 0.25, DTYPES["bf16"])
    qkv[0, 0 if largest == "query" else 2, 0 if largest == "query" else -1] = -8
    for wanted in (True, False):
        slot = device.put(np.full(1, 0.5, np.float32))
        rope.rope_backward_launch(
            device.put(qkv).address, *common, rows=B * T, T=T, H=H, G=G, D=D,
            absmax=slot.address if wanted else 0, stream=device.stream,
        )  # fmt: skip
        assert slot.numpy()[0] == (8 if wanted else 0.5)  # position 0 rotates by nothing


def check_user_functions(device: Device) -> None:
    rng = np.random.default_rng(7)
    B, T, H, G, D = 2, 6, 2, 1, 32
    qkv = rng.standard_normal((B, T, (H + 2 * G) * D)).astype(DTYPES["bf16"])
    (cos, sin), start = tables(T, D), starts(B, T)
    buffer = device.put(qkv)
    arrays = [device.put(a).array() for a in (cos, sin, start)]
    rope.forward(buffer.array(), *arrays, heads=H, kv_heads=G)
    forward = buffer.numpy()
    assert_within(forward, rope_ref(qkv, cos, sin, start, H, G), relative=U16, absolute=2.0**-20)
    rope.backward(buffer.array(), *arrays, heads=H, kv_heads=G)
    # backward undoes forward up to the two roundings, each half an ulp of a value below the pair's
    # norm
    assert np.abs(buffer.numpy().astype(np.float64) - qkv).max() <= 4 * U16 * np.abs(forward).max()
    with pytest.raises(ValueError, match="do not share"):
        rope.forward(buffer.array(), *arrays, heads=3, kv_heads=1)
    short = device.put(cos[:4]).array(), device.put(sin[:4]).array()
    with pytest.raises(ValueError, match="have 4 positions, T is 6"):
        rope.forward(buffer.array(), *short, arrays[2], heads=H, kv_heads=G)


# (1, 1, 1, 1, 16): one pair of pieces; 14 + 2 heads of 64: whole groups; 5 + 1: a ragged group
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D"), [(1, 1, 1, 1, 16), (2, 7, 14, 2, 64), (2, 5, 5, 1, 128)]
)
@pytest.mark.parametrize("backward", [False, True])
def test_simulated(B: int, T: int, H: int, G: int, D: int, backward: bool) -> None:
    run_sim(check, B=B, T=T, H=H, G=G, D=D, backward=backward)


def test_fp32_simulated() -> None:
    run_sim(check, B=2, T=5, H=3, G=1, D=32, backward=True, dtype="fp32")


@pytest.mark.parametrize("largest", ["query", "value"])
def test_absmax_simulated(largest: str) -> None:
    run_sim(check_absmax, largest=largest)


def test_user_functions_simulated() -> None:
    run_sim(check_user_functions)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D"),
    [(1, 1, 1, 1, 16), (3, 333, 14, 2, 64), (2, 1024, 12, 2, 128), (2, 100, 40, 8, 128)],
)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rope(
    gpu: Device, B: int, T: int, H: int, G: int, D: int, backward: bool, dtype: str
) -> None:
    check(gpu, B, T, H, G, D, backward, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("largest", ["query", "value"])
def test_absmax(gpu: Device, largest: str) -> None:
    check_absmax(gpu, largest)


@pytest.mark.gpu
def test_user_functions(gpu: Device) -> None:
    check_user_functions(gpu)
