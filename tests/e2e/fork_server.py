"""Runs `llmq-nb` command lines as processes of their own without paying for the imports each time.

One JSON job a line on stdin: {argv, cwd, out, err, before, env}. Each is a fork of this process:
`before` (Python source) is executed in it first, then the real entry point. The answer is
{"code": n}, negative for a signal.
"""

import json
import os
import sys
import traceback
import warnings

import llmq_nb.cli
import llmq_nb.cli.eval_command
import llmq_nb.report.plot
import llmq_nb.train.inference
import llmq_nb.train.run  # noqa: F401


def serve() -> dict:
    """Answers jobs; returns the job in the child."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return job
        _, status = os.waitpid(pid, 0)
        answers.write(json.dumps({"code": os.waitstatus_to_exitcode(status)}) + "\n")
    sys.exit(0)


def run(job: dict) -> None:
    """The command line of a job, in this process."""
    for number, path in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        file = os.open(path, flags, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.argv = ["llmq-nb", *job["argv"]]
    code = 1
    try:
        exec(job["before"], {"__name__": "before"})
        llmq_nb.cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking all modules down again would double the time


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # fork beside BLAS threads
    run(serve())
