"""embedding: forward exact; backward bit for bit a NumPy loop in row order, and against float64."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import embedding, embedding_backward
from llmq_nb.kernels.embedding_backward import embedding_backward_ref
from llmq_nb.kernels.embedding_join import SEGMENT, WARPS
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}


def draw(N: int, V: int) -> np.ndarray:
    """Tokens with one that makes up half of them, the first and the last of the vocabulary."""
    rng = np.random.default_rng(N + V)
    tokens = np.where(rng.random(N) < 0.5, V // 2, rng.integers(0, V, N)).astype(np.int32)
    tokens[[0, -1]] = V - 1, 0
    return tokens


def cut_sums(dx: np.ndarray, tokens: np.ndarray, order: np.ndarray, V: int) -> np.ndarray:
    """float32 row sums as the docstring of embedding.py has them, with plain loops."""
    ordered, sums = tokens[order], np.zeros((V, dx.shape[1]), np.float32)
    for token in np.unique(ordered):
        run = np.flatnonzero(ordered == token)
        begin, end = run[0], run[-1] + 1
        edges = [begin, *(b for b in range(0, end, SEGMENT) if b - SEGMENT >= begin), end]
        pieces = np.zeros((len(edges) - 1, dx.shape[1]), np.float32)
        for piece, first, last in zip(pieces, edges, edges[1:], strict=False):
            for n in order[first:last]:
                piece += dx[n]
        shares = np.zeros((WARPS, dx.shape[1]), np.float32)
        for p, piece in enumerate(pieces):
            shares[p % WARPS] += piece
        for share in shares:
            sums[token] += share
    return sums


def check_forward(device: Device, N: int, C: int, V: int, dtype: str = "bf16") -> None:
    table = np.random.default_rng(1).standard_normal((V, C)).astype(DTYPES[dtype])
    tokens = draw(N, V)
    if N > 4:
        tokens[[1, 3]] = -1, V
    x = device.empty((N, C), DTYPES[dtype])
    embedding.embedding_forward_launch(
        x.address, device.put(tokens).address, device.put(table).address, rows=N, C=C, V=V,
        dtype=dtype, stream=device.stream,
    )  # fmt: skip
    got, known = x.numpy(), (tokens >= 0) & (tokens < V)
    np.testing.assert_array_equal(got[known].view(np.uint8), table[tokens[known]].view(np.uint8))
    assert np.isnan(got[~known].astype(np.float32)).all()


def check_backward(
    device: Device, N: int, C: int, V: int, accumulate: bool, dtype: str = "bf16",
    grad_dtype: str = "bf16", tokens: np.ndarray | None = None,
) -> None:  # fmt: skip
    rng = np.random.default_rng(2)
    dx = (rng.standard_normal((N, C)) * 2.0 ** rng.integers(-4, 4, (N, 1))).astype(DTYPES[dtype])
    old = rng.standard_normal((V, C)).astype(DTYPES[grad_dtype])
    tokens = draw(N, V) if tokens is None else tokens
    order = np.argsort(tokens, kind="stable").astype(np.int32)
    dtable, scratch = device.put(old), device.empty((-(-N // SEGMENT), C), np.float32)
    embedding_backward.embedding_backward_launch(
        dtable.address, device.put(dx).address, device.put(tokens).address,
        device.put(order).address, scratch=scratch.address, rows=N, C=C, V=V, accumulate=accumulate,
        dtype=dtype, grad_dtype=grad_dtype, stream=device.stream,
    )  # fmt: skip
    sums = cut_sums(dx.astype(np.float32), tokens, order, V)
    if accumulate:
        touched = np.unique(tokens)
        want = old.copy()
        want[touched] = (old[touched].astype(np.float32) + sums[touched]).astype(old.dtype)
    else:
        want = sums.astype(DTYPES[grad_dtype])
    got = dtable.numpy()
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    reference = embedding_backward_ref(dx, tokens, V) + (old.astype(np.float64) * accumulate)
    size = embedding_backward_ref(np.abs(dx.astype(np.float64)), tokens, V) + np.abs(
        old.astype(np.float64)
    )
    adds = np.bincount(tokens, minlength=V)[:, None] + 1
    rounding = U16 if grad_dtype == "bf16" else 0.0
    assert_within(got, reference, relative=rounding, absolute=adds * U32 * size)


def runs(*lengths: int) -> np.ndarray:
    """Tokens whose ordered runs have these lengths, shuffled."""
    tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return np.random.default_rng(4).permutation(tokens)


# runs that begin and end at, before and after segment borders; whole segments; one token alone
RUNS = [(64,), (31, 1, 33), (32, 32, 1), (31, 34, 70), (1, 63, 33, 31), (33, 95, 5), (400,)]


def check_runs(device: Device, lengths: tuple[int, ...], accumulate: bool) -> None:
    check_backward(device, sum(lengths), 16, len(lengths), accumulate, tokens=runs(*lengths))


def random_lengths(seed: int) -> tuple[int, ...]:
    """Runs of a few rows, of about a segment, of two or more."""
    rng = np.random.default_rng(seed)
    about = rng.choice([2, SEGMENT, 2 * SEGMENT, 5 * SEGMENT], 12, p=[0.5, 0.2, 0.2, 0.1])
    return tuple(int(n) for n in np.maximum(1, about + rng.integers(-1, 2, 12)))


def check_unknown_tokens(device: Device, N: int) -> None:
    """Long runs of tokens outside the vocabulary leave the table as it is."""
    dx, old = np.ones((N, 16), DTYPES["bf16"]), np.full((3, 16), 2.0, DTYPES["bf16"])
    tokens = np.where(np.arange(N) < N // 2, -1, 3).astype(np.int32)
    order = np.argsort(tokens, kind="stable").astype(np.int32)
    dtable, scratch = device.put(old), device.empty((-(-N // SEGMENT), 16), np.float32)
    embedding_backward.embedding_backward_launch(
        dtable.address, device.put(dx).address, device.put(tokens).address,
        device.put(order).address, scratch=scratch.address, rows=N, C=16, V=3, accumulate=True,
        stream=device.stream,
    )  # fmt: skip
    np.testing.assert_array_equal(dtable.numpy(), old)


def check_user_functions(device: Device) -> None:
    rng = np.random.default_rng(3)
    table = rng.standard_normal((10, 16)).astype(DTYPES["bf16"])
    tokens = rng.integers(0, 10, (2, 3)).astype(np.int32)
    order = np.argsort(tokens.reshape(-1), kind="stable").astype(np.int32)
    dx = rng.standard_normal((2, 3, 16)).astype(DTYPES["bf16"])
    t = device.put(tokens)
    x = embedding.forward(t.array(), device.put(table).array())
    dtable = embedding.backward(
        device.put(dx).array(), t.array(), device.put(order).array(), vocab=10
    )
    x, dtable = (a if isinstance(a, np.ndarray) else a.numpy() for a in (x, dtable))
    assert (x == table[tokens]).all()
    want = embedding_backward_ref(dx.reshape(-1, 16), tokens.reshape(-1), 10)
    assert_within(dtable, want, relative=U16, absolute=2.0**-20)
    odd = device.put(np.zeros((4, 12), DTYPES["bf16"])).array()
    with pytest.raises(ValueError, match="multiples of 8"):
        embedding.forward(t.array(), odd)


# 8: one lane; 264: a second group of columns with one busy lane; 150 rows: runs of more than 64
@pytest.mark.parametrize(("N", "C", "V"), [(1, 8, 1), (37, 264, 50)])
def test_forward_simulated(N: int, C: int, V: int) -> None:
    run_sim(check_forward, N=N, C=C, V=V)
    run_sim(check_forward, N=N, C=C, V=V, dtype="fp32")


@pytest.mark.parametrize(
    ("N", "C", "V", "accumulate"), [(2, 8, 2, False), (150, 16, 30, True), (40, 264, 7, False)]
)
def test_backward_simulated(N: int, C: int, V: int, accumulate: bool) -> None:
    run_sim(check_backward, N=N, C=C, V=V, accumulate=accumulate)


@pytest.mark.parametrize("lengths", [*RUNS, random_lengths(0), random_lengths(1)], ids=str)
def test_runs_simulated(lengths: tuple[int, ...]) -> None:
    run_sim(check_runs, lengths=lengths, accumulate=len(lengths) != 3)


def test_unknown_tokens_simulated() -> None:
    run_sim(check_unknown_tokens, N=150)


def test_backward_fp32_simulated() -> None:
    run_sim(check_backward, N=20, C=16, V=9, accumulate=True, grad_dtype="fp32")
    run_sim(check_backward, N=20, C=16, V=9, accumulate=False, dtype="fp32", grad_dtype="fp32")


def test_user_functions_simulated() -> None:
    run_sim(check_user_functions)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "C", "V"), [(1, 8, 1), (1001, 896, 5000), (4096, 1536, 272)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_both(gpu: Device, N: int, C: int, V: int, dtype: str) -> None:
    check_forward(gpu, N, C, V, dtype)
    for accumulate in (False, True):
        if N > 1:
            check_backward(gpu, N, C, V, accumulate, dtype, dtype)
            check_backward(gpu, N, C, V, accumulate, dtype, "fp32")
    check_user_functions(gpu)
    for lengths in [*RUNS, *map(random_lengths, range(40))]:
        check_runs(gpu, lengths, accumulate=True)
    check_unknown_tokens(gpu, 1000)


@pytest.mark.gpu
def test_one_token_is_the_whole_batch(gpu: Device) -> None:
    check_backward(gpu, 3001, 896, 5, True, tokens=np.full(3001, 3, np.int32))
