"""The one-line examples of the kernels' docstrings run as they stand, with every kind of array.

Oracle: an example gives, to the bit, the same for torch tensors and for numba device arrays as for
the harness's own arrays, with which each kernel's test compares it with its reference. In the
simulator the examples run on NumPy arrays and must not raise.
"""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.harness import ROOT, Device, run_sim

BF16 = np.dtype(ml_dtypes.bfloat16)
H, G, D, B, T = 14, 2, 16, 2, 3


def _inputs() -> dict[str, dict[str, np.ndarray]]:
    """Arrays that the examples of a module name; None of them is an output."""
    rng = np.random.default_rng(0)

    def bf16(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(BF16)

    def fp32(*shape: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)

    tokens = rng.integers(0, 50, (B, T)).astype(np.int32)
    heads = {"qkv": bf16(B, T, (H + 2 * G) * D), "dqkv": bf16(B, T, (H + 2 * G) * D)}
    packed = {"qkv": bf16(2, 32 * D), "dheads": bf16(2, 32 * D)}
    scale = {"scale": np.array([0.25], np.float32)}
    return {
        "adamw": {"master": fp32(100), "m": fp32(100), "v": fp32(100), "grad": bf16(100)},
        "attention": {
            "q": bf16(1, T, 2, 64), "k": bf16(1, T, 1, 64), "v": bf16(1, T, 1, 64),
            "dout": bf16(1, T, 2, 64), "out": bf16(1, T, 2, 64), "lse": fp32(1, 2, T),
            "segment_start": np.array([[0, 0, 2]], np.int32),
        },
        "attention_cached": {
            "qkv": bf16(1, 1, (H + 2 * G) * D), "cache": bf16(1, 8, 2 * G * D),
            "segment_start": np.full((1, 1), -4, np.int32),
        },
        "bias": {"dy": bf16(5, 40)},
        "cross_entropy": {
            "logits": bf16(4, 48), "targets": np.array([0, 47, -100, 5], np.int32), **scale
        },
        "elementwise": {"x": bf16(4, 8)},
        "embedding": {"tokens": tokens, "table": bf16(50, 16)},
        "embedding_backward": {
            "tokens": tokens, "dx": bf16(B, T, 16),
            "order": np.argsort(tokens.reshape(-1), kind="stable").astype(np.int32),
        },
        "global_norm": {"g1": bf16(8), "g2": bf16(3, 16)},
        "qk_norm": {
            **packed, "q_weight": bf16(D), "k_weight": bf16(D), "rstd": fp32(2, 24)
        },
        "quantize": {"x": bf16(16, 32)},
        "reduce_loss": {"loss": fp32(9), "lse": fp32(9), **scale},
        "rmsnorm": {"x": bf16(5, 64), "weight": bf16(64)},
        "rmsnorm_backward": {
            "x": bf16(5, 64), "dy": bf16(5, 64), "weight": bf16(64), "rstd": fp32(5)
        },
        "rope": {
            **heads, "cos": fp32(T, D // 2), "sin": fp32(T, D // 2),
            "segment_start": np.zeros((B, T), np.int32),
        },
        "swiglu": {"gate_up": bf16(3, 32), "dy": bf16(3, 16)},
        "transpose": {"x": bf16(16, 24)},
        "transpose_bytes": {"x": bf16(16, 32)},
    }  # fmt: skip


def examples() -> list[tuple[str, str]]:
    """(module, line of code) of every example in kernels/."""
    found = []
    for info in pkgutil.iter_modules([str(ROOT / "kernels")]):
        module = importlib.import_module(f"llmq_nb.kernels.{info.name}")
        for _, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__:
                lines = (inspect.getdoc(function) or "").splitlines()
                found += [(info.name, s[4:]) for s in map(str.strip, lines) if s[:4] == ">>> "]
    return found


def host(x: Any) -> np.ndarray:
    """The bytes of any of the arrays that a kernel returns."""
    if isinstance(x, np.ndarray):
        return x.reshape(-1).view(np.uint8)
    if type(x).__module__.startswith("torch"):
        import torch  # pyright: ignore[reportMissingImports]

        return x.contiguous().view(torch.uint8).cpu().numpy().reshape(-1)
    if hasattr(x, "copy_to_host"):
        return x.view(np.uint8).copy_to_host().reshape(-1)
    return x.numpy().reshape(-1).view(np.uint8)


def run(name: str, code: str, put: Callable[[np.ndarray], Any]) -> dict[str, np.ndarray]:
    """Every array after an example: those it was given and those it assigned."""
    modules = {n: importlib.import_module(f"llmq_nb.kernels.{n}") for n in _inputs()}
    names: dict[str, Any] = {n: put(a) for n, a in _inputs()[name].items()}
    exec(code, {**modules, **names}, names)
    return {n: host(x).copy() for n, x in names.items()}


def as_torch(array: np.ndarray) -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array.copy()).cuda()


def as_numba(array: np.ndarray) -> Any:
    from numba import cuda

    if array.dtype == BF16:  # numba copies no types of ml_dtypes, but holds them
        return cuda.to_device(array.view(np.uint16)).view(BF16)
    return cuda.to_device(np.ascontiguousarray(array))


LIBRARIES = {"numba": as_numba, "torch": as_torch}
INSTALLED = [n for n in LIBRARIES if importlib.util.find_spec(n)]


def check_simulated(device: Device, name: str, code: str) -> None:
    after = run(name, code, lambda a: device.put(a).array())
    assert set(after) >= set(_inputs()[name])


def test_every_kernel_has_an_example() -> None:
    assert set(_inputs()) == {name for name, _ in examples()}


@pytest.mark.parametrize(("name", "code"), examples())
def test_example_simulated(name: str, code: str) -> None:
    run_sim(check_simulated, name=name, code=code)


@pytest.mark.gpu
@pytest.mark.parametrize("library", INSTALLED)
@pytest.mark.parametrize(("name", "code"), examples())
def test_example(gpu: Device, library: str, name: str, code: str) -> None:
    buffers = []

    def put(array: np.ndarray) -> Any:
        buffers.append(gpu.put(array))
        return Readable(buffers[-1])

    want, got = run(name, code, put), run(name, code, LIBRARIES[library])
    assert set(want) == set(got)
    for n in want:
        np.testing.assert_array_equal(want[n], got[n], err_msg=f"{n} of {code}")


class Readable:
    """A harness buffer as a DLPack producer whose contents can be read back."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self._array = buffer, buffer.array()
        self.__dlpack_device__ = self._array.__dlpack_device__
        self.numpy = buffer.numpy

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._array.__dlpack__(**keywords)
