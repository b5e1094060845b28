"""Two processes under mpirun, as two machines: the run of one process with two ranks, to the bit.

Needs mpi4py and MPI's mpirun, both in the `test` extra.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.e2e.runs import ROOT, Cli, Result, hashes, make_run, numbers, write_config

MPIRUN = Path(sys.executable).with_name("mpirun")
TRAIN = ("train", "config.toml")
ENDS_WITHIN = 10.0
"""Seconds, from the failure of one process to the end of all."""
OPTIONS: dict[str, Any] = {
    "precision": {"matmul": "e4m3"},
    "optimizer": {"master": "bf16", "m": "e4m3", "v": "bf16"},
    "batch": {"micro_batch": 1, "grad_accumulation": 2},
    "schedule": {"kind": "wsd", "steps": 6},
    "log": {"sample": "the cat"},
}


def ranks(*devices: int) -> dict[str, Any]:
    return {"parallel": {"devices": list(devices), "shard_gradients": True}}


def start(cwd: Path, *command: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    line = [str(MPIRUN), "-n", "2", sys.executable, *command]
    return subprocess.Popen(line, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)


def mpirun(cwd: Path, *command: str) -> Result:
    process = start(cwd, *command)
    out, err = process.communicate(timeout=120)
    return Result(process.returncode, out, err)


def test_two_processes_have_the_bits_of_two_ranks_and_go_on_as_one(cli: Cli, tmp_path: Path):
    """Three steps on two machines, three more in one process: as six steps in one process."""
    whole = make_run(tmp_path / "whole", OPTIONS, ranks(0, 0))
    assert cli("train", "config.toml", cwd=whole).code == 0
    part = make_run(tmp_path / "part", OPTIONS, ranks(0), {"schedule": {"steps": 3}})
    result = mpirun(part, "-m", "llmq_nb", *TRAIN)
    assert result.code == 0 and result.err == "", result.err
    assert result.out.count("step 3/3") == 1 and "1 rank each" in result.out, "one process speaks"
    name = "checkpoints/step_00000003"
    for piece in ("master", "m", "v"):
        assert hashes(part / "out" / name / piece) == hashes(whole / "out" / name / piece)
    write_config(part, OPTIONS, ranks(0, 0))
    assert cli("train", "config.toml", cwd=part).code == 0
    assert numbers(part / "out")["steps"] == numbers(whole / "out")["steps"]
    assert hashes(part / "out/export") == hashes(whole / "out/export")


def test_a_process_that_fails_ends_all_with_its_traceback(tmp_path: Path):
    """The other one waits inside its step for gradients that never come."""
    who = 1
    folder = make_run(tmp_path, OPTIONS, ranks(0))
    process = start(folder, str(ROOT / "tests/e2e/machine_driver.py"), str(who), *TRAIN)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < ENDS_WITHIN
    assert process.returncode == 1
    assert err.count("Traceback") == 1 and f"KeyError: 'a bug in process {who}'" in err, err


def test_a_signal_to_one_process_is_a_checkpoint_of_all(tmp_path: Path):
    """SIGTERM to the second process alone; the first one has to hear of it."""
    long = {"schedule": {"steps": 100_000}, "checkpoint": {"every": 0}, "eval": {"every": 0}}
    folder = make_run(tmp_path, OPTIONS, ranks(0), long)
    code = "import os; open(os.environ['PMI_RANK'], 'w').write(str(os.getpid()))\n"
    code += "import sys; sys.argv = ['llmq-nb', 'train', 'config.toml']\n"
    process = start(folder, "-c", code + "from llmq_nb.cli import main; main()")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    os.kill(int((folder / "1").read_text()), signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert out.count("stopped by signal 15; checkpoint: ") == 1
    assert len(list((folder / "out/checkpoints").glob("step_*/manifest.json"))) == 1


def test_a_mistake_is_said_once(tmp_path: Path):
    folder = make_run(tmp_path, {"parallel": {"shard_weights": True}})
    result = mpirun(folder, "-m", "llmq_nb", *TRAIN)
    assert result.code == 2 and "shard_weights = true on several machines" in result.error


def test_machines_in_the_config_without_a_launcher(cli: Cli, tmp_path: Path):
    folder = make_run(tmp_path, {"parallel": {"machines": 2}})
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 2 and "start it with mpirun or srun" in result.error


def test_a_launcher_without_mpi4py(cli: Cli, tmp_path: Path):
    """The first process says it, the second one has the same exit code and is silent."""
    folder = make_run(tmp_path)
    before = "import sys; sys.modules['mpi4py'] = None"
    for rank, said in (("0", "pip install -e '.[cluster]'"), ("1", "")):
        env = {"PMI_SIZE": "2", "PMI_RANK": rank}
        result = cli("train", "config.toml", cwd=folder, before=before, env=env)
        assert result.code == 2 and said in result.err and result.err.count("\n") == bool(said)
