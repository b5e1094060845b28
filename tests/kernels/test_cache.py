"""The compile cache: the key follows what the machine code depends on, damage and read-only homes
are survived.

Oracle: two kernels that differ in one thing must have different keys; the same one, the same key,
also in another process.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels import cache
from llmq_nb.kernels import compile as compiler
from llmq_nb.kernels.compile import DEFAULT, Options, cache_key, compile_kernel, to_ptx
from llmq_nb.kernels.ptx import ldg32f, stg32f
from tests.kernels.harness import ROOT

SIGNATURE = (types.uint64, types.float32)


def make_scale(factor: float, inner: float = 1.0):
    FACTOR, INNER = np.float32(factor), np.float32(inner)

    @cuda.jit(device=True)
    def times(value):
        return value * INNER

    def scale(x, bias):
        i = cuda.threadIdx.x
        stg32f(x + i * 4, times(ldg32f(x + i * 4)) * FACTOR + bias)

    return scale


def make_double_precision():
    def double_precision(x, bias):
        stg32f(x, ldg32f(x) * 1.5 + bias)

    return double_precision


def key(function=None, signature=SIGNATURE, threads=32, cc=(8, 9), options=DEFAULT) -> str:
    return cache_key(function or make_scale(2.0), signature, threads, cc, options)


def test_key_changes_with_everything_the_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        key(),
        key(make_scale(3.0)),  # constant of the kernel
        key(make_scale(2.0, 3.0)),  # constant of a device function it calls
        key(signature=(types.uint64, types.int32)),
        key(threads=64),
        key(cc=(9, 0)),
        key(options=Options(min_blocks=2)),
        key(options=Options(fastmath=False)),
    ]
    monkeypatch.setattr(cache, "package_versions", lambda: {"numba": "another"})
    keys.append(key())
    monkeypatch.setattr(cache, "module_digest", lambda path: "another source")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_key_is_the_same_in_another_process() -> None:
    command = "from tests.kernels.test_cache import key; print(key())"
    other = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, check=True
    )
    assert other.stdout.decode().strip() == key()


def test_digest_covers_imported_kernel_modules(tmp_path: Path) -> None:
    source = "from llmq_nb.kernels.reduce import warp_sum\n"
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "b.py").write_text(source.replace("reduce", "vector"))
    assert cache.module_digest(str(tmp_path / "a.py")) != cache.module_digest(
        str(tmp_path / "b.py")
    )


def test_second_compile_is_read_from_disk_and_damage_is_recompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMQ_NB_CACHE", str(tmp_path))
    first = compile_kernel(make_scale(2.0), SIGNATURE, 32, (8, 9))
    (cubin,) = tmp_path.glob("*.cubin")
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "to_ptx", lambda *_: pytest.fail("compiled again"))
        assert compile_kernel(make_scale(2.0), SIGNATURE, 32, (8, 9)) == first
    cubin.write_bytes(first.cubin[:100])
    assert len(compile_kernel(make_scale(2.0), SIGNATURE, 32, (8, 9)).cubin) == len(first.cubin)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [
        ".cubin",
        ".json",
    ]  # no temporaries left


def test_float64_is_a_build_error() -> None:
    with pytest.raises(RuntimeError, match="float64"):
        to_ptx(make_double_precision(), SIGNATURE, 32, (8, 9))


@pytest.mark.parametrize(
    ("cc", "options", "target"),
    [
        ((8, 0), DEFAULT, "sm_80"),
        ((9, 0), Options(arch_specific=True), "sm_90a"),
        ((12, 0), DEFAULT, "sm_120"),
    ],
)
def test_ptx_is_for_the_target(cc, options, target) -> None:
    assert f".target {target}\n" in to_ptx(make_scale(2.0), SIGNATURE, 32, cc, options)


def test_fixed_cluster_is_in_the_ptx() -> None:
    ptx = to_ptx(make_scale(2.0), SIGNATURE, 32, (9, 0), Options(cluster=2))
    assert ".reqnctapercluster 2, 1, 1" in ptx


def test_unwritable_folder_falls_back_with_one_line(tmp_path: Path, capsys) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    folder = cache.choose_folder(str(blocked / "below"))
    assert folder.is_dir() and cache.is_writable(folder)
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written" in line and str(folder) in line


@pytest.mark.parametrize(
    ("cc", "target"),
    [((8, 0), (8, 0)), ((8, 7), (8, 6)), ((8, 9), (8, 9)), ((10, 3), (10, 0)), ((12, 1), (12, 0))],
)
def test_card_runs_the_newest_target_of_its_major(cc, target) -> None:
    assert compiler.target_of(cc) == target


def test_unknown_major_is_refused() -> None:
    with pytest.raises(ValueError, match="13.0"):
        compiler.target_of((13, 0))


def test_compiles_where_numpy_has_no_row_stack() -> None:
    """NumPy 2.5 removed it, numba-cuda 0.30 asks for it."""
    command = (
        "import numpy as np; del np.row_stack\n"
        "from tests.kernels.test_cache import SIGNATURE, make_scale, to_ptx\n"
        "print('.entry' in to_ptx(make_scale(2.0), SIGNATURE, 32, (8, 9)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert other.stdout.strip() == "True", other.stderr
