"""embedding: forward exact; backward against a float64 scatter, with runs of every kind, and
bitwise twice."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import embedding
from llmq_nb.kernels.embedding import RUN, embedding_backward_ref, embedding_backward_scratch
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": U32}


def token_patterns(N: int, V: int) -> dict[str, np.ndarray]:
    """Token sets whose sorted runs lie inside blocks of RUN, cross them, span several, fill all."""
    rng = np.random.default_rng(N)
    few = np.repeat(np.arange(V), -(-N // V))[:N]
    skewed = np.where(rng.random(N) < 0.8, 3, rng.integers(0, V, N))
    return {
        "one": np.full(N, V - 1),
        "mixed": rng.integers(0, V, N),
        "skewed": skewed,
        "few": rng.permutation(few),
    }


def check_forward(device: Device, N: int, C: int, dtype: str = "bf16") -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((50, C)).astype(DTYPES[dtype])
    tokens = rng.integers(0, 50, N).astype(np.int32)
    tokens[0], tokens[-1] = 49, 0
    x = device.empty((N, C), DTYPES[dtype])
    embedding.embedding_forward_launch(
        x.address, device.put(tokens).address, device.put(table).address, N=N, C=C, dtype=dtype,
        stream=device.stream,
    )  # fmt: skip
    np.testing.assert_array_equal(x.numpy().view(np.uint8), table[tokens].view(np.uint8))


def check_backward(
    device: Device, N: int, C: int, pattern: str, dtype: str = "bf16", grad_dtype: str = "bf16"
) -> None:
    V = 9
    tokens = token_patterns(N, V)[pattern].astype(np.int32)
    rng = np.random.default_rng(1)
    dx = rng.standard_normal((N, C)).astype(DTYPES[dtype])
    old = rng.standard_normal((V, C)).astype(DTYPES[grad_dtype])
    order = np.argsort(tokens, kind="stable").astype(np.int32)
    tokens_, order_, dx_ = device.put(tokens), device.put(order), device.put(dx)
    results = []
    for _ in range(2):
        dtable = device.put(old)
        scratch = device.empty((embedding_backward_scratch(N, C) // 4,), np.float32)
        embedding.embedding_backward_launch(
            dtable.address, dx_.address, tokens_.address, order_.address, scratch=scratch.address,
            N=N, C=C, dtype=dtype, grad_dtype=grad_dtype, stream=device.stream,
        )  # fmt: skip
        results.append(dtable.numpy())
    assert results[0].tobytes() == results[1].tobytes()
    expected = embedding_backward_ref(old, dx, tokens)
    sums = embedding_backward_ref(np.abs(old), np.abs(dx), tokens)
    bound = (RUN + N / RUN + 2) * U32 * sums
    assert_within(results[0], expected, relative=ROUNDING[grad_dtype], absolute=bound)
    absent = np.setdiff1d(np.arange(V), tokens)
    assert results[0][absent].tobytes() == old[absent].tobytes()


def check_user_functions(device: Device) -> None:
    rng = np.random.default_rng(2)
    table = rng.standard_normal((12, 16)).astype(DTYPES["bf16"])
    tokens = rng.integers(0, 12, (2, 5)).astype(np.int32)
    tokens_ = device.put(tokens).array()
    x = embedding.forward(tokens_, device.put(table).array())
    x = x if isinstance(x, np.ndarray) else x.numpy()
    np.testing.assert_array_equal(x.view(np.uint16), table[tokens].view(np.uint16))
    order = device.put(np.argsort(tokens.reshape(-1), kind="stable").astype(np.int32)).array()
    dtable = device.zeros((12, 16), DTYPES["bf16"])
    embedding.backward(dtable.array(), device.put(x).array(), tokens_, order)
    expected = embedding_backward_ref(np.zeros((12, 16)), x, tokens)
    assert_within(dtable.numpy(), expected, relative=U16, absolute=2.0**-19)
    with pytest.raises(ValueError, match=r"order has shape \(10,\), must be \(9\)"):
        nine = device.put(tokens.reshape(-1)[:9].copy()).array()
        embedding.backward(
            dtable.array(), device.put(x.reshape(10, 16)[:9].copy()).array(), nine, order
        )


PATTERNS = ["one", "mixed", "skewed", "few"]


def test_forward_simulated() -> None:
    run_sim(check_forward, N=1, C=8)
    run_sim(check_forward, N=70, C=72)
    run_sim(check_forward, N=5, C=16, dtype="fp32")


# 1: a single position; 32: exactly one block; 70: two and a bit; 160: a run over several blocks
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("N", [1, 32, 70, 160])
def test_backward_simulated(N: int, pattern: str) -> None:
    run_sim(check_backward, N=N, C=24, pattern=pattern)


def test_backward_formats_simulated() -> None:
    run_sim(check_backward, N=70, C=1032, pattern="mixed", grad_dtype="fp32")
    run_sim(check_backward, N=40, C=8, pattern="skewed", dtype="fp32", grad_dtype="fp32")


def test_user_functions_simulated() -> None:
    run_sim(check_user_functions)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "C"), [(1, 8), (4096, 896), (1001, 5120)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_forward(gpu: Device, N: int, C: int, dtype: str) -> None:
    check_forward(gpu, N, C, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("N", "C"), [(1, 8), (70, 896), (4096, 1536), (2000, 1032)])
@pytest.mark.parametrize("grad_dtype", ["bf16", "fp32"])
def test_backward(gpu: Device, N: int, C: int, pattern: str, grad_dtype: str) -> None:
    check_backward(gpu, N, C, pattern, grad_dtype=grad_dtype)


@pytest.mark.gpu
def test_user_functions(gpu: Device) -> None:
    check_user_functions(gpu)
