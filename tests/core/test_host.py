"""Room for pinned memory: MemAvailable and what every enclosing cgroup leaves."""

import pytest

from llmq_nb.core import host
from llmq_nb.core.host import pinnable_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 64 GiB available; returns (root of its cgroups, a writer, a reader)."""
    monkeypatch.setattr(host, "_meminfo", lambda: {"MemAvailable": 64 * GIB, "SwapFree": 99 * GIB})
    own = tmp_path / "self"

    def write(folder, names, limit, use, stat):
        place = tmp_path / "cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / names[0]).write_text(f"{limit}\n")
        (place / names[1]).write_text(f"{use}\n")
        (place / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))

    def read(line):
        own.write_text(line)
        return pinnable_bytes(tmp_path / "cgroup", own)

    return write, read


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_without_a_limit_it_is_what_is_available_without_swap(machine):
    write, read = machine
    write("", V2, "max", 10 * GIB, {})
    assert read("0::/\n") == 64 * GIB


def test_page_cache_counts_as_free(machine):
    write, read = machine
    write("a/b", V2, 20 * GIB, 15 * GIB, {"anon": 9 * GIB, "inactive_file": 6 * GIB})
    assert read("0::/a/b\n") == (20 - 15 + 6) * GIB


def test_the_tightest_enclosing_group_counts(machine):
    write, read = machine
    write("a", V2, 30 * GIB, 28 * GIB, {"inactive_file": 0})
    write("a/b", V2, 20 * GIB, 2 * GIB, {"inactive_file": 0})
    assert read("0::/a/b\n") == 2 * GIB


def test_the_first_version_of_cgroups(machine):
    write, read = machine
    write("memory/docker/x", V1, 8 * GIB, 5 * GIB, {"total_inactive_file": GIB})
    assert read("12:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n") == 4 * GIB


def test_this_machine_gives_a_number():
    found = pinnable_bytes()
    assert found is not None and 0 < found < 1 << 50
