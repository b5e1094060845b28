"""attention_cached against float64 NumPy on the same stored values, and the cache to the bit.

Bound (kernel docstring): a score of D products is wrong by (D + 4) U sum |q k| / sqrt(D), which
enters the output through both softmax sums; those add at most S terms each, ex2 is 2^-22 off.
"""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import attention_cached
from llmq_nb.kernels.attention_cached import attention_cached_ref
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": 0.0}


def bound(heads: np.ndarray, cache: np.ndarray, H: int, G: int) -> float:
    """One number for all elements: the largest value times the relative error of its weights."""
    D, S = heads.shape[2] // (H + 2 * G), cache.shape[1]
    q = np.abs(heads[..., : H * D].astype(np.float64)).reshape(-1, D)
    k, v = np.abs(cache.astype(np.float64)).reshape(-1, S, 2, G * D).transpose(2, 0, 1, 3)
    score = q.sum(1).max() * k.max() / np.sqrt(D)
    weights = 2 * ((D + 4) * U32 * score + (S + 8) * U32 + 2.0**-21)
    return float(weights * v.max())


def check(
    device: Device, firsts: tuple[int, ...], T: int, S: int, H: int, G: int, D: int, dtype: str
) -> None:
    """Rows that begin at the positions `firsts`; what lies behind them in the cache is NaN."""
    B = len(firsts)
    rng = np.random.default_rng(B * T + S)
    heads = rng.standard_normal((B, T, (H + 2 * G) * D)).astype(DTYPES[dtype])
    cache = np.full((B, S, 2 * G * D), np.nan, np.float32).astype(DTYPES[dtype])
    for b, first in enumerate(firsts):
        cache[b, :first] = rng.standard_normal((min(first, S), 2 * G * D))
    start = np.repeat(-np.array(firsts, np.int32)[:, None], T, axis=1)
    buffer, out = device.put(cache), device.empty((B, T, H * D), DTYPES[dtype])
    attention_cached.attention_cached_launch(
        out.address, buffer.address, device.put(heads).address, device.put(start).address,
        B=B, T=T, S=S, H=H, G=G, D=D, dtype=dtype, stream=device.stream,
    )  # fmt: skip
    expected, filled = attention_cached_ref(heads, cache, start, H, G)
    np.testing.assert_array_equal(buffer.numpy().view(np.uint8), filled.view(np.uint8))
    limit = bound(heads, np.nan_to_num(filled.astype(np.float32)), H, G)
    assert_within(out.numpy(), expected, relative=ROUNDING[dtype], absolute=limit)


def check_user_function(device: Device) -> None:
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((2, 3, 4 * 16)).astype(DTYPES["bf16"])
    cache = np.zeros((2, 8, 2 * 16), DTYPES["bf16"])
    start = np.zeros((2, 3), np.int32)
    buffer, arrays = device.put(cache), [device.put(qkv).array(), device.put(start).array()]
    out = attention_cached.forward(arrays[0], buffer.array(), arrays[1], heads=2, kv_heads=1)
    expected, filled = attention_cached_ref(qkv, cache, start, 2, 1)
    np.testing.assert_array_equal(buffer.numpy().view(np.uint8), filled.view(np.uint8))
    shape = out.shape
    assert tuple(shape) == expected.shape
    with pytest.raises(ValueError, match="do not share"):
        attention_cached.forward(arrays[0], buffer.array(), arrays[1], heads=3, kv_heads=1)
    with pytest.raises(ValueError, match="cache"):
        attention_cached.forward(arrays[0], arrays[0], arrays[1], heads=2, kv_heads=1)


# (0,), T 1: a first token; 5: a ragged group of keys; 40 keys of D 64: past one round of 8 warps;
# S 6 with first 4 and T 3: the last token has no room and sees what is there
CASES = [
    ((0,), 1, 1, 1, 1, 64, "bf16"),
    ((5, 40), 1, 64, 4, 2, 64, "bf16"),
    ((0, 3), 5, 9, 3, 1, 16, "bf16"),
    ((17,), 2, 32, 3, 3, 128, "bf16"),
    ((4,), 3, 6, 2, 1, 32, "fp32"),
]


@pytest.mark.parametrize(("firsts", "T", "S", "H", "G", "D", "dtype"), CASES)
def test_simulated(
    firsts: tuple[int, ...], T: int, S: int, H: int, G: int, D: int, dtype: str
) -> None:
    run_sim(check, firsts=firsts, T=T, S=S, H=H, G=G, D=D, dtype=dtype)


def test_user_function_simulated() -> None:
    run_sim(check_user_function)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("firsts", "T", "S", "H", "G", "D", "dtype"),
    [
        *CASES,
        ((0, 1, 700, 1023), 1, 1024, 14, 2, 64, "bf16"),
        ((0, 100), 128, 300, 9, 3, 64, "fp32"),
        ((3000,), 1, 4096, 28, 4, 128, "bf16"),
    ],
)
def test_attention_cached(
    gpu: Device, firsts: tuple[int, ...], T: int, S: int, H: int, G: int, D: int, dtype: str
) -> None:
    check(gpu, firsts, T, S, H, G, D, dtype)


@pytest.mark.gpu
def test_user_function(gpu: Device) -> None:
    check_user_function(gpu)
