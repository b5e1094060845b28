"""bias against a float64 sum; the bound is the number of float32 additions in the docstring."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import bias
from llmq_nb.kernels.bias import PARTIALS, bias_backward_ref, bias_backward_scratch
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": 0.0}


def check(
    device: Device, N: int, M: int, accumulate: bool, dtype: str = "bf16",
    grad_dtype: str = "bf16", runs: int = 2,
) -> None:  # fmt: skip
    rng = np.random.default_rng(N)
    dy = (rng.standard_normal((N, M)) * 2.0 ** rng.integers(-6, 6, (1, M))).astype(DTYPES[dtype])
    old = (rng.standard_normal(M) * 10).astype(DTYPES[grad_dtype])
    dy_, results = device.put(dy), []
    for _ in range(runs):
        dbias = device.put(old) if accumulate else device.empty((M,), DTYPES[grad_dtype])
        scratch = device.empty((bias_backward_scratch(M) // 4,), np.float32)
        bias.bias_backward_launch(
            dbias.address, dy_.address, scratch=scratch.address, rows=N, M=M,
            accumulate=accumulate, dtype=dtype, grad_dtype=grad_dtype,
            stream=device.stream,
        )  # fmt: skip
        results.append(dbias.numpy())
    assert results[0].tobytes() == results[-1].tobytes()
    want, size = bias_backward_ref(dy), bias_backward_ref(np.abs(dy.astype(np.float64)))
    if accumulate:
        want, size = want + old.astype(np.float64), size + np.abs(old.astype(np.float64))
    adds = N / (8 * PARTIALS) + 8 + PARTIALS / 32 + 33
    assert_within(results[0], want, relative=ROUNDING[grad_dtype], absolute=adds * U32 * size)


def check_user_function(device: Device) -> None:
    dy = np.arange(6 * 16).reshape(2, 3, 16).astype(DTYPES["bf16"])
    got = bias.backward(device.put(dy).array())
    host = got if isinstance(got, np.ndarray) else got.numpy()
    assert_within(host, bias_backward_ref(dy), relative=U16)
    with pytest.raises(ValueError, match="multiple of 8"):
        bias.backward(device.put(np.zeros((4, 12), DTYPES["bf16"])).array())


# 300 rows, 32 groups: a second row for a warp of a group. 264: two blocks of columns.
def test_simulated() -> None:
    run_sim(check, N=300, M=264, accumulate=True, runs=1)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "M"), [(3, 8), (129, 264), (1040, 2048), (32768, 1152)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_backward(gpu: Device, N: int, M: int, dtype: str) -> None:
    check(gpu, N, M, False, dtype, dtype)
    check(gpu, N, M, True, dtype, "fp32")
    check_user_function(gpu)
