"""Bias gradient and column sums against float64 NumPy; bound: the kernel docstring's error
model."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import bias
from llmq_nb.kernels.bias import ROW_STEP, bias_backward_ref, bias_backward_scratch
from llmq_nb.kernels.column_sum import BLOCKS, column_sum_launch
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": U32}


def check_backward(
    device: Device, N: int, C: int, accumulate: bool, dtype: str = "bf16", grad_dtype: str = "bf16",
    repeats: int = 1,
) -> None:  # fmt: skip
    rng = np.random.default_rng(N + C)
    dy = rng.standard_normal((N, C)).astype(DTYPES[dtype])
    old = (rng.standard_normal(C) * 10).astype(DTYPES[grad_dtype])
    scratch = device.empty((bias_backward_scratch(C) // 4,), np.float32)
    results = []
    for _ in range(repeats):
        dbias = device.put(old)
        bias.bias_backward_launch(
            dbias.address, device.put(dy).address, scratch=scratch.address, rows=N, C=C,
            accumulate=accumulate, dtype=dtype, grad_dtype=grad_dtype, stream=device.stream,
        )  # fmt: skip
        results.append(dbias.numpy())
    assert len({r.tobytes() for r in results}) == 1
    base = old.astype(np.float64) if accumulate else 0.0
    sums = np.abs(dy.astype(np.float64)).sum(0) + np.abs(base)
    bound = (N / ROW_STEP + 62) * U32 * sums
    expected = bias_backward_ref(dy) + base
    assert_within(results[0], expected, relative=ROUNDING[grad_dtype], absolute=bound)


def check_column_sum_is_exact_on_integers(device: Device) -> None:
    partial = np.random.default_rng(0).integers(-100, 100, (BLOCKS, 40)).astype(np.float32)
    out = device.put(np.full(40, 7, np.float32))
    column_sum_launch(
        out.address, device.put(partial).address, C=40, accumulate=True, grad_dtype="fp32",
        stream=device.stream,
    )  # fmt: skip
    np.testing.assert_array_equal(out.numpy(), partial.sum(0) + 7)


def check_user_function(device: Device) -> None:
    dy = np.random.default_rng(3).standard_normal((2, 3, 24)).astype(DTYPES["bf16"])
    out = bias.backward(device.put(dy).array())
    out = out if isinstance(out, np.ndarray) else out.numpy()
    assert_within(out, bias_backward_ref(dy), relative=U16, absolute=2.0**-19)
    with pytest.raises(ValueError, match="multiple of 8"):
        bias.backward(device.put(np.zeros((2, 12), DTYPES["bf16"])).array())


# 8: one lane; 264: a second block of columns with one lane; 300 rows: more than one round of the
# grid
@pytest.mark.parametrize(("N", "C", "accumulate"), [(1, 8, False), (264, 264, True)])
def test_backward_simulated(N: int, C: int, accumulate: bool) -> None:
    run_sim(check_backward, N=N, C=C, accumulate=accumulate)


def test_fp32_simulated() -> None:
    run_sim(check_backward, N=5, C=16, accumulate=False, dtype="fp32", grad_dtype="fp32")
    run_sim(check_column_sum_is_exact_on_integers)


def test_user_function_simulated() -> None:
    run_sim(check_user_function)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "C"), [(1, 8), (300, 264), (20001, 1152), (4096, 2048)])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32",) * 2]
)
def test_backward(gpu: Device, N: int, C: int, dtype: str, grad_dtype: str) -> None:
    check_backward(gpu, N, C, True, dtype=dtype, grad_dtype=grad_dtype, repeats=2)
    check_backward(gpu, N, C, accumulate=False, dtype=dtype, grad_dtype=grad_dtype)


@pytest.mark.gpu
def test_column_sum_and_user_function(gpu: Device) -> None:
    check_column_sum_is_exact_on_integers(gpu)
    check_user_function(gpu)
