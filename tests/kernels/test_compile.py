"""Every kernel compiles without a GPU, keeps its tiles in registers and fits every card (tier 2).

Oracle: nvJitLink's own resource report. sm_89 and sm_120 for all, every target for attention; the
rest of the matrix is marked slow.
"""

import tomllib
from pathlib import Path

import pytest

from llmq_nb.kernels.compile import (
    COMMON_SHARED_BYTES,
    TARGETS,
    CompileCase,
    Resources,
    _resources,
    compile_kernel,
)
from tests.kernels.harness import all_compile_cases

CASES = all_compile_cases()
ALLOWED = tomllib.loads((Path(__file__).parent / "resources.toml").read_text())
QUICK = {(8, 9), (12, 0)}


def targets(case: CompileCase) -> list[tuple[int, int]]:
    """Compute capabilities that have the kernel's instructions."""
    if case.only_cc:
        return [case.only_cc]
    return [t for t in TARGETS if t >= case.min_cc]


def parameters() -> list[object]:
    found = []
    for name, case in CASES:
        have = targets(case)
        quick = [t for t in have if t in QUICK] or have[:1]
        for cc in have:
            suffix = "a" if case.options.arch_specific else ""
            arch = f"sm_{cc[0]}{cc[1]}{suffix}"
            always = cc in quick or name.startswith("attention")
            marks = [] if always else [pytest.mark.slow]
            found.append(pytest.param(name, case, cc, arch, id=f"{name}-{arch}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "case", "cc", "arch"), parameters())
def test_compiles_within_its_resources(
    name: str, case: CompileCase, cc: tuple[int, int], arch: str
) -> None:
    compiled = compile_kernel(
        case.factory(**case.constants), case.signature, case.threads, cc, case.options
    )
    used = compiled.resources
    assert used.stack_bytes <= ALLOWED.get(name, {}).get(arch, 0), used
    assert 0 < used.registers <= 65536 // case.threads, used
    if not case.only_cc:
        assert case.smem + used.shared_bytes <= COMMON_SHARED_BYTES, used


def test_names_are_unique() -> None:
    names = [name for name, _ in CASES]
    assert len(names) == len(set(names))


def test_allowances_name_kernels_that_exist() -> None:
    assert set(ALLOWED) <= {name for name, _ in CASES}


def test_resources_of_either_log() -> None:
    """nvJitLink 13.0 has left out ptxas's lines where two processes compiled the same at once."""
    short = (
        "info    : 8 bytes gmem\ninfo    : Function properties for 'k':\n"
        "info    : used 18 registers, used 0 barriers, 16 stack, 0 bytes smem, 0 bytes lmem\n"
    )
    full = (
        "ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 18 registers, used 0 barriers\n"
    )
    assert _resources("", short) == Resources(18, 16, 0, 0)
    assert _resources("", full + short) == Resources(18, 16, 12, 0)
    with pytest.raises(RuntimeError, match="no resources"):
        _resources("", "nothing")
