"""`llmq-nb` in one of several processes, of which process WHO raises in the middle of its step 3.

mpirun -n 2 python machine_driver.py WHO train config.toml ...
"""

import os
import sys

from llmq_nb.cli import main
from llmq_nb.comm.gradients import GradientReduction
from llmq_nb.train.engine import CpuEngine

who = int(sys.argv.pop(1))
steps, real_step, real_sum = [0], CpuEngine.train_step, GradientReduction._sum


def train_step(self, *args, **values):
    steps[0] += 1
    return real_step(self, *args, **values)


def failing_sum(self, each):
    if steps[0] == 3 and int(os.environ["PMI_RANK"]) == who:
        raise KeyError(f"a bug in process {who}")
    real_sum(self, each)


CpuEngine.train_step, GradientReduction._sum = train_step, failing_sum  # type: ignore
main()
