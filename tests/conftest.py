"""Tests marked gpu or browser are deselected where there is none, those marked slow where -m does
not ask for them; the header says so.

A run of the whole suite (plain `pytest`) goes to a process a core, a file to one of them at a time,
where pytest-xdist is installed; `-n 0` keeps it in one.
"""

import os
import shutil

import hypothesis
import pytest

from llmq_nb.core.device import device_count

# an example's time says how busy the machine is, not whether the code is right
hypothesis.settings.register_profile("unhurried", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("unhurried")


MOST_WORKERS = 4
"""Each has a simulator and interpreters of its own: up to 3 GiB."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Divide a run of everything over the cores, before xdist reads how many it wants."""
    options = config.option
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    whole = whole and "PYTEST_XDIST_WORKER" not in os.environ  # a worker divides no further
    if whole and getattr(options, "numprocesses", 0) is None and not options.usepdb:
        options.numprocesses = min(MOST_WORKERS, os.cpu_count() or 1)
        options.dist = "loadfile"  # what a file's tests share is made once


def pytest_report_header() -> str:
    count = device_count()
    gpus = f"{count} GPU(s)" if count else "no GPU or driver, tests marked gpu are deselected"
    found = shutil.which("chromium") is not None
    browser = "Chromium" if found else "no Chromium, tests marked browser are deselected"
    return f"{gpus}; {browser}; `-m slow` compiles every kernel for every card"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {"gpu": device_count() < 1, "multi_gpu": device_count() < 2}
    missing["browser"] = shutil.which("chromium") is None
    missing["slow"] = "slow" not in config.option.markexpr
    dropped = [
        i for i in items if any(absent and i.get_closest_marker(m) for m, absent in missing.items())
    ]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [i for i in items if i not in set(dropped)]
