"""cross_entropy against float64 NumPy (the three equations, nothing shared with the kernel).

Bounds are the error model of the kernel's docstring. Zeros, padding and masked rows are exact.
"""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import cross_entropy
from llmq_nb.kernels.cross_entropy import cross_entropy_ref, tile_of
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": U32}
Tile = tuple[int, int] | None


def case(N: int, V: int, Vp: int, dtype: str, magnitude: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits with rubbish in the padding, and targets: first, last, random, some masked."""
    rng = np.random.default_rng(N * V)
    logits = (rng.standard_normal((N, Vp)) * magnitude).astype(DTYPES[dtype])
    logits[:, V:] = 1000.0  # would rule every sum if it counted
    targets = rng.integers(0, V, N).astype(np.int32)
    targets[:3] = [V - 1, -100, 0][:N]
    targets[5::7] = -100
    return logits, targets


def check(
    device: Device, N: int, V: int, Vp: int, gradient: bool = True, dtype: str = "bf16",
    magnitude: float = 3.0, z_loss: float = 1e-3, tile: Tile = None,
) -> None:  # fmt: skip
    logits, targets = case(N, V, Vp, dtype, magnitude)
    inv = np.float32(1.0 / 7.0)
    buffer, loss, lse = device.put(logits), *(device.empty((N,), np.float32) for _ in range(2))
    cross_entropy.cross_entropy_launch(
        buffer.address, loss.address, lse.address, device.put(targets).address,
        device.put(np.array([inv])).address if gradient else 0, rows=N, V=V, Vp=Vp,
        gradient=gradient, z_loss=z_loss, dtype=dtype, tile=tile, stream=device.stream,
    )  # fmt: skip
    z = z_loss if gradient else 0.0
    loss_ref, lse_ref, grad_ref = cross_entropy_ref(logits, targets, V, float(inv), z)
    x64 = logits[:, :V].astype(np.float64)
    top = np.abs(x64).max(axis=1)
    log2_sum = (lse_ref - x64.max(axis=1)) / np.log(2)
    serial = V / tile_of(V)[0] + 16
    lse_bound = serial * U32 + (3 + top + log2_sum) * 2.0**-22
    assert_within(lse.numpy(), lse_ref, absolute=lse_bound, what="lse")
    slack = lse_bound * (1 + 2 * z * np.abs(lse_ref)) + 4 * U32 * (np.abs(lse_ref) + top + 1)
    assert_within(loss.numpy(), loss_ref, absolute=slack, what="loss")
    masked = targets == -100
    assert (loss.numpy()[masked] == 0).all()
    if not gradient:
        np.testing.assert_array_equal(buffer.numpy().view(np.uint8), logits.view(np.uint8))
        return
    got = buffer.numpy()
    assert (got[:, V:] == 0).all() and (got[masked] == 0).all()
    softmax = np.exp(x64 - lse_ref[:, None]) * (1 + 2 * z * np.abs(lse_ref[:, None]))
    relative = (2 * top[:, None] * U32 + 2.0**-21 + lse_bound[:, None] + 6 * U32) * softmax * inv
    absolute = np.zeros(got.shape)
    absolute[:, :V] = relative + 2 * U32 * np.abs(grad_ref[:, :V])
    assert_within(got, grad_ref, relative=ROUNDING[dtype], absolute=absolute + 1e-37, what="grad")


def check_nan(device: Device) -> None:
    """A NaN logit and a target outside the vocabulary show in the loss of their row alone."""
    logits = np.zeros((3, 32), DTYPES["bf16"])
    logits[0, 9] = np.nan
    targets = np.array([1, 2, 25], np.int32)
    loss, lse = (device.empty((3,), np.float32) for _ in range(2))
    cross_entropy.cross_entropy_launch(
        device.put(logits).address, loss.address, lse.address, device.put(targets).address, 0,
        rows=3, V=24, Vp=32, gradient=False, stream=device.stream,
    )  # fmt: skip
    assert np.isnan(loss.numpy()).tolist() == [True, False, True]


def check_extremes(device: Device) -> None:
    """Logits at which exp overflows or all but one term vanish."""
    rows = [np.linspace(-300, 300, 64), np.full(64, -300.0), np.full(64, 300.0)]
    logits = np.stack(rows).astype(DTYPES["bf16"])
    targets = np.array([63, 5, 0], np.int32)
    buffer, loss, lse = device.put(logits), *(device.empty((3,), np.float32) for _ in range(2))
    cross_entropy.cross_entropy_launch(
        buffer.address, loss.address, lse.address, device.put(targets).address,
        device.put(np.ones(1, np.float32)).address, rows=3, V=64, Vp=64, gradient=True,
        stream=device.stream,
    )  # fmt: skip
    loss_ref, lse_ref, grad_ref = cross_entropy_ref(logits, targets, 64, 1.0)
    assert_within(lse.numpy(), lse_ref, absolute=310 * 2.0**-22)
    assert_within(loss.numpy(), loss_ref, absolute=620 * 2.0**-22)
    assert_within(buffer.numpy(), grad_ref, relative=U16, absolute=310 * 2.0**-22)


def check_user_functions(device: Device) -> None:
    logits, targets = case(6, 60, 64, "bf16", 2.0)
    first, second = device.put(logits), device.put(logits)
    t, scale = device.put(targets), device.put(np.array([0.25], np.float32))
    results = [
        *cross_entropy.forward(first.array(), t.array(), vocab=60),
        *cross_entropy.backward(second.array(), t.array(), scale.array(), vocab=60),
    ]
    loss, lse, loss2, lse2 = (r if isinstance(r, np.ndarray) else r.numpy() for r in results)
    loss_ref, lse_ref, grad_ref = cross_entropy_ref(logits, targets, 60, 0.25)
    assert_within(loss, loss_ref, absolute=2.0**-18)
    assert_within(lse, lse_ref, absolute=2.0**-18)
    assert (loss == loss2).all() and (lse == lse2).all()
    assert_within(second.numpy(), grad_ref, relative=U16, absolute=2.0**-18)


def check_user_errors(device: Device) -> None:
    logits, targets = case(2, 24, 24, "bf16", 1.0)
    with pytest.raises(ValueError, match="multiple of 16"):
        cross_entropy.forward(device.put(logits).array(), device.put(targets).array())
    logits, targets = case(2, 32, 32, "bf16", 1.0)
    with pytest.raises(ValueError, match="vocab is 33, must be 1 to 32"):
        cross_entropy.forward(device.put(logits).array(), device.put(targets).array(), vocab=33)


# 1: nothing but a broken piece; 271: odd; 4100 and 1300: half a piece at the end, more than fits
# into the shared memory of the tile (some of it; none of it).
SIM_CASES = [
    (2, 1, 16, None),
    (3, 271, 272, None),
    (2, 48, 64, None),
    (1, 4100, 4112, (32, 8)),
    (1, 1300, 1312, (64, 0)),
]


@pytest.mark.parametrize(("N", "V", "Vp", "tile"), SIM_CASES)
def test_gradient_simulated(N: int, V: int, Vp: int, tile: Tile) -> None:
    run_sim(check, N=N, V=V, Vp=Vp, tile=tile)


def test_forward_simulated() -> None:
    run_sim(check, N=6, V=271, Vp=272, gradient=False)


def test_fp32_simulated() -> None:
    run_sim(check, N=2, V=1301, Vp=1312, dtype="fp32")


def test_values_simulated() -> None:
    run_sim(check_nan)
    run_sim(check_extremes)


def test_user_functions_simulated() -> None:
    run_sim(check_user_functions)
    run_sim(check_user_errors)


# Qwen2.5, Llama 3, Llama 2, SmolLM2, bytes; 50257: odd, padded.
GPU_CASES = [(5, 151936, 151936), (9, 128256, 128256), (33, 32000, 32000), (64, 49152, 49152)]
GPU_CASES += [(300, 257, 272), (7, 50257, 50272), (3, 1, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "V", "Vp"), GPU_CASES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradient(gpu: Device, N: int, V: int, Vp: int, dtype: str) -> None:
    check(gpu, N, V, Vp, dtype=dtype)
    check(gpu, N, V, Vp, dtype=dtype, gradient=False, magnitude=20.0)


@pytest.mark.gpu
def test_values(gpu: Device) -> None:
    check_nan(gpu)
    check_extremes(gpu)
    check_user_functions(gpu)


@pytest.mark.gpu
def test_repeats_bitwise(gpu: Device) -> None:
    logits, targets = case(40, 151936, 151936, "bf16", 3.0)
    t, scale = gpu.put(targets), gpu.put(np.array([0.1], np.float32))
    results = []
    for _ in range(2):
        buffer, loss, lse = gpu.put(logits), *(gpu.empty((40,), np.float32) for _ in range(2))
        cross_entropy.cross_entropy_launch(
            buffer.address, loss.address, lse.address, t.address, scale.address, rows=40,
            V=151936, Vp=151936, gradient=True, z_loss=1e-4, stream=gpu.stream,
        )  # fmt: skip
        results.append([b.numpy().tobytes() for b in (buffer, loss, lse)])
    assert results[0] == results[1]
