"""A machine with an NVIDIA driver, played by a library of five functions that a C compiler builds.

No CUDA engine can run on the stand-in: every run trains on the cpu and says why.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, Cli, make_run

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}
int cuInit(unsigned flags) { return flags ? 1 : number("STANDIN_INIT", 0); }
int cuDriverGetVersion(int *v) { *v = number("STANDIN_CUDA", 13000); return 0; }
int cuDeviceGetCount(int *n) { *n = number("STANDIN_GPUS", 1); return 0; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return 0; }
int cuDeviceGetName(char *name, int room, int device) {
    const char *known = device == 40 ? "Stand-in RTX 1" : device == 41 ? "Stand-in RTX 2" : "?";
    strncpy(name, known, room);
    return 0;
}
"""
CU13 = "pip install -e '.[cu13]'"
CU12 = "pip install -e '.[cu12]'"


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """The command line where libcuda.so.1 is the stand-in."""
    folder = tmp_path_factory.mktemp("driver")
    assert shutil.which("cc"), "this test builds a stand-in for NVIDIA's driver: it needs cc"
    (folder / "cuda.c").write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "cuda.c")]
    subprocess.run(command, check=True)
    cli = Cli({"LD_LIBRARY_PATH": str(folder)})
    yield cli
    cli.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path, {"schedule": {"steps": 2}})


NO_PACKAGES = 'import llmq_nb.core.driver as d; d.PACKAGES = ("cuda.bindings", "no_such_package")'
ALL_PACKAGES = 'import llmq_nb.core.driver as d; d.PACKAGES = ("cuda.bindings", "numpy")'


@pytest.mark.parametrize(
    "cuda, shown, command",
    [("13000", "13.0", CU13), ("13020", "13.2", CU13), ("12080", "12.8", CU12)],
)
def test_the_command_is_said_before_training_and_at_the_end(
    cuda: str, shown: str, command: str, gpu: Cli, run: Path
) -> None:
    result = gpu("train", "config.toml", cwd=run, before=NO_PACKAGES, env={"STANDIN_CUDA": cuda})
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("step 1/"))
    said = f"GPU found: Stand-in RTX 1 (driver for CUDA {shown}); to use it: {command}"
    assert said in lines[:first]
    assert lines[-1] == said
    assert "no_such_package" in lines[0] and "not installed" in lines[0]


def test_doctor_says_it_too(gpu: Cli, run: Path) -> None:
    two = {"STANDIN_CUDA": "12040", "STANDIN_GPUS": "2"}
    result = gpu("doctor", cwd=run, before=NO_PACKAGES, env=two)
    assert result.code == 0, result.err
    assert "NVIDIA driver for CUDA 12.4: Stand-in RTX 1, Stand-in RTX 2" in result.out
    assert CU12 in result.out and CU13 not in result.out


def test_with_all_packages_it_trains_on_the_cpu_and_says_so(gpu: Cli, run: Path) -> None:
    result = gpu("train", "config.toml", cwd=run, before=ALL_PACKAGES)
    assert result.code == 0, result.err
    assert result.out.splitlines()[0].startswith("device: cpu (Stand-in RTX 1")
    assert "head_dim 16: the GPU's attention has 64 and 128" in result.out.splitlines()[0]
    assert "pip install" not in result.out


@pytest.mark.parametrize("before, words", [(NO_PACKAGES, [CU13]), (ALL_PACKAGES, ["cpu"])])
def test_cuda_is_refused(before: str, words: list[str], gpu: Cli, run: Path) -> None:
    argv = ("train", "config.toml", "--set", "run.device=cuda")
    result = gpu(*argv, cwd=run, before=before)
    assert result.code == 2
    assert all(word in result.error for word in ["run.device", *words]), result.error
    assert not (run / "out").exists() and not (run / "train.zarr").exists()


def test_cpu_as_asked_for(gpu: Cli, run: Path) -> None:
    argv = ("train", "config.toml", "--set", "run.device=cpu")
    result = gpu(*argv, cwd=run, before=NO_PACKAGES)
    assert result.code == 0
    assert result.out.splitlines()[0] == "device: cpu, as run.device says"
    assert "pip install" not in result.out


@pytest.mark.parametrize("env", [{"STANDIN_GPUS": "0"}, {"STANDIN_INIT": "100"}])
def test_a_driver_without_a_gpu(env: dict[str, str], gpu: Cli, run: Path) -> None:
    result = gpu("train", "config.toml", cwd=run, env=env)
    assert result.code == 0, result.err
    assert result.out.splitlines()[0] == "device: cpu (no NVIDIA GPU or driver was found)"


def test_bindings_newer_than_the_driver_are_missing() -> None:
    from llmq_nb.core.driver import Driver, missing_packages

    old = missing_packages(Driver(11080, ("old",)))
    assert any(name.startswith("cuda-bindings") for name in old)
    assert not any("cuda-bindings" in name for name in missing_packages(Driver(99000, ("new",))))


def test_a_library_that_is_no_driver() -> None:
    from llmq_nb.core.driver import find_driver

    assert find_driver("libc.so.6") is None
    assert find_driver(str(ROOT / "README.md")) is None
