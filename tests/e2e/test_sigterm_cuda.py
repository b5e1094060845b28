"""SIGTERM while kernels compile for a real GPU: exit code 143 within 10 s, nothing written."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [1, 12])
def test_sigterm_while_kernels_compile(compiled: int, tmp_path: Path) -> None:
    """An empty cache: the signal comes when the first kernel, or the twelfth, has come into it."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (tmp_path / "text.py").write_text("def f(x):\n    return x + 1\n\n" * 2000)
    sets = ['data.sources=["text.py"]', "data.train=train.zarr", "data.validation=v.zarr"]
    sets += ["run.device=cuda", "run.out_dir=out", "eval.steps=1"]
    config = ROOT / "configs/quickstart.toml"
    command = [sys.executable, "-m", "llmq_nb", "train", str(config)]
    command += [part for item in sets for part in ("--set", item)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "LLMQ_NB_CACHE": str(cache)}
    pipe = subprocess.PIPE
    run = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=env)
    deadline = time.monotonic() + 120
    while len(list(cache.rglob("*.cubin"))) < compiled:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.01)  # until the other process has got there
    run.terminate()
    begin = time.monotonic()
    out, error = run.communicate(timeout=60)
    assert time.monotonic() - begin < 10
    assert run.returncode == 143 and error == "", error
    assert out.splitlines()[-1] == "stopped by signal 15; no step was made"
    assert not (tmp_path / "out").exists()
