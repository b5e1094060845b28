"""Tests marked gpu or browser are deselected (and counted) where there is none.

The header says so.
"""

import shutil

import hypothesis
import pytest

from llmq_nb.core.device import device_count

# an example's time says how busy the machine is, not whether the code is right
hypothesis.settings.register_profile("unhurried", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("unhurried")


def pytest_report_header() -> str:
    count = device_count()
    gpus = f"{count} GPU(s)" if count else "no GPU or driver, tests marked gpu are deselected"
    found = shutil.which("chromium") is not None
    return f"{gpus}; {'Chromium' if found else 'no Chromium, tests marked browser are deselected'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {"gpu": device_count() < 1, "multi_gpu": device_count() < 2}
    missing["browser"] = shutil.which("chromium") is None
    dropped = [
        i for i in items if any(absent and i.get_closest_marker(m) for m, absent in missing.items())
    ]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [i for i in items if i not in set(dropped)]
