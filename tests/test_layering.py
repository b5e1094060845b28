"""Imports go one way, and kernels/, comm/, offload/ are packaged as DESIGN section 2 says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "llmq_nb"
LINKED = ("kernels", "comm", "offload")
SERVICES = {"offload", "model", "plan", "data", "io", "report"}
# What each may import besides itself and core; config (a leaf) is added for those that take it.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "config": set(),
    "config_file": {"config"},
    "kernels": set(),
    "report": {"config"},
    "data": {"config"},
    "model": {"kernels", "config"},
    "io": {"model", "config"},
    "plan": {"model", "kernels", "config"},
    "comm": {"kernels", "config"},
    "offload": {"kernels", "config"},
    "train": {"comm", "kernels", "config", "config_file"} | SERVICES,
    "cli": {"train", "comm", "kernels", "config", "config_file"} | SERVICES,
    "__init__": {"train", "config", "config_file"},
    "__main__": {"cli"},
}
# config checks its values, reads sizes such as "15GiB" and raises UserError: nothing else
CONFIG_OF_CORE = ("llmq_nb.core.errors", "llmq_nb.core.sizes")


def unit(module: str) -> str:
    """`llmq_nb.model.ops` -> `model`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def sources() -> list[tuple[str, Path]]:
    """(module name, file) of everything in the package, through the three links."""
    found = []
    roots = [PACKAGE, *(PACKAGE / name for name in LINKED)]  # rglob does not follow links
    for file in sorted({f for root in roots for f in root.rglob("*.py")}):
        parts = ("llmq_nb", *file.relative_to(PACKAGE).with_suffix("").parts)
        found.append((".".join(parts), file))
    return found


def imports_of(file: Path) -> list[str]:
    """Full names of what a file imports, wherever in it; `from a import b` counts as a.b."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize(("module", "file"), sources(), ids=lambda x: x if type(x) is str else "")
def test_imports_go_one_way(module, file):
    own = unit(module)
    assert own in MAY_IMPORT, f"a new top-level module {own}: say here what it may import"
    allowed = MAY_IMPORT[own] | {own, "core"}
    for name in imports_of(file):
        top = name.split(".")[0]
        assert top not in {*LINKED, "tests", "bench"}, f"{module} imports {name}"
        if top == "llmq_nb":
            assert unit(name) in allowed, f"{module} imports {name}"
            if own == "config":
                assert name.startswith(CONFIG_OF_CORE), name


def test_the_walk_sees_the_package():
    modules = {module for module, _ in sources()}
    assert {"llmq_nb.core.rng", "llmq_nb.model.engine_cpu.ops", "llmq_nb.train.step"} <= modules
    for name in LINKED:
        if any((ROOT / name).glob("*.py")):
            assert any(module.startswith(f"llmq_nb.{name}.") for module in modules), name


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders(name):
    """Links in the package, and no __init__.py, which would hide PyPI's package of that name."""
    link = PACKAGE / name
    assert link.is_symlink() and link.readlink() == Path("..") / name
    assert not list((ROOT / name).rglob("__init__.py"))
