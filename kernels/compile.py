"""Python kernel -> PTX (Numba, NVVM) -> cubin (nvJitLink), with a disk cache. Needs no GPU and no
driver.

A kernel is what a factory returns: `make_rmsnorm_forward(C=2048)`; its constants are closure
variables. The result is kept as `<name>-<key>.cubin` and `.json` (entry point, resources) in the
cache folder (cache.py says what the key covers), written atomically, so that several processes may
compile at once.

A `.f64` instruction is a build error: it is always an untyped float literal, and 64 times slower on
most cards.
"""

import contextlib
import hashlib
import json
import re
import time
import types as pytypes
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir

from llmq_nb.kernels.cache import cache_folder, source_key, write_atomically

if not hasattr(np, "row_stack"):  # numba-cuda 0.30 registers it; NumPy 2.5 removed it
    np.row_stack = np.vstack  # pyright: ignore[reportAttributeAccessIssue]

TARGETS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""Compute capabilities that cubins are made for; a card runs the newest of its major that is not
newer."""

COMMON_SHARED_BYTES = 101_376
"""Shared memory a block may have on every card from sm_80 (sm_86, 89 and 120 have the least)."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a kernel is compiled, beside its constants."""

    min_blocks: int = 0
    """Blocks a multiprocessor should hold at least (limits registers); 0 leaves it to ptxas."""
    arch_specific: bool = False
    """Compile for the "a" target of the card (wgmma, setmaxnreg): runs on that compute capability
    only."""
    fastmath: bool = True
    cluster: int = 1
    """Blocks a cluster, along x; above 1 needs sm_90. Fixed in the PTX, or, with arch_specific,
    which has none, given with every launch."""


DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread or block of a compiled kernel takes; -1: nvJitLink did not say."""

    registers: int
    stack_bytes: int
    """Local memory a thread: register tiles that were indexed at run time, or spills."""
    spill_bytes: int
    shared_bytes: int
    """Static shared memory a block."""
    warnings: tuple[str, ...] = ()
    """Lines of ptxas that are warnings, such as C7513 (wgmma serialised)."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what is known about it."""

    name: str
    cubin: bytes = field(repr=False)
    entry: str
    resources: Resources
    numba_seconds: float
    link_seconds: float


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One kernel with representative constants: what `COMPILE_CASES` of a kernel file lists."""

    factory: Callable[..., Callable[..., None]]
    constants: dict[str, Any]
    signature: tuple[Any, ...]
    threads: int
    smem: int = 0
    """Dynamic shared memory, bytes."""
    options: Options = DEFAULT
    min_cc: tuple[int, int] = (8, 0)
    """First compute capability that has the kernel's instructions."""
    only_cc: tuple[int, int] | None = None
    """The one compute capability of an arch_specific kernel."""


def target_of(cc: tuple[int, int]) -> tuple[int, int]:
    """The target whose cubin a card of this compute capability runs. ValueError if there is
    none."""
    fits = [t for t in TARGETS if t[0] == cc[0] and t[1] <= cc[1]]
    if not fits:
        raise ValueError(f"no target for compute capability {cc[0]}.{cc[1]}; have {TARGETS}")
    return fits[-1]


def arch_of(cc: tuple[int, int], options: Options = DEFAULT) -> str:
    """ptxas's name of a target: sm_90, sm_90a."""
    return f"sm_{cc[0]}{cc[1]}" + "a" * options.arch_specific


def _whole_program(options: Options) -> bool:
    """Whether to link from LTO-IR (see to_ltoir)."""
    return options.arch_specific


def cache_key(
    function: Callable[..., None],
    signature: tuple[Any, ...],
    threads: int,
    cc: tuple[int, int],
    options: Options,
) -> str:
    """32 hexadecimal digits that change whenever the machine code could."""
    types_ = [str(t) for t in signature]
    return source_key(function, types_, threads, cc, asdict(options), _whole_program(options))


# ---- compile -----------------------------------------------------------------------------------
def _with_cluster(set_launch_bounds: Callable[..., None], blocks: int) -> Callable[..., None]:
    """Numba's function that annotates a kernel, with a fixed cluster size, so that the plain launch
    call works."""

    def annotate(kernel: Any, bounds: Any) -> None:
        set_launch_bounds(kernel, bounds)
        module = kernel.module
        for axis, extent in zip("xyz", (blocks, 1, 1), strict=True):
            name = ir.MetaDataString(module, f"cluster_dim_{axis}")
            value = ir.Constant(ir.IntType(32), extent)
            annotation = module.add_metadata((kernel, name, value))
            module.get_named_metadata("nvvm.annotations").add(annotation)

    return annotate


@contextlib.contextmanager
def _without_gpu(cc: tuple[int, int], cluster: int = 1) -> Iterator[None]:
    """Numba-CUDA 0.30 asks the current device (when device functions are called) and NVRTC (for the
    target's name, and for where libdevice is) even in cuda.compile(cc=...): answer for them."""
    from numba.cuda import codegen, cuda_paths, dispatcher
    from numba.cuda.cudadrv import nvvm

    device = pytypes.SimpleNamespace(compute_capability=cc)
    patches: list[tuple[Any, str, Any]] = [
        (dispatcher, "get_current_device", lambda: device),
        (
            codegen.nvrtc,
            "get_arch_option",
            lambda major, minor, arch="": f"compute_{major}{minor}{arch}",
        ),
        (cuda_paths, "_get_nvrtc_path", lambda: cuda_paths._env_path_tuple("not needed", None)),
    ]
    if cluster > 1:
        bounds = _with_cluster(nvvm.set_launch_bounds, cluster)  # pyright: ignore
        patches.append((nvvm, "set_launch_bounds", bounds))
    paths_known = hasattr(cuda_paths.get_cuda_paths, "_cached_result")
    saved = [getattr(module, name) for module, name, _ in patches]
    try:
        for module, name, answer in patches:
            setattr(module, name, answer)
        yield
    finally:
        for (module, name, _), original in zip(patches, saved, strict=True):
            setattr(module, name, original)
        if not paths_known and hasattr(cuda_paths.get_cuda_paths, "_cached_result"):
            del cuda_paths.get_cuda_paths._cached_result  # others may need the real path of NVRTC


def to_ptx(
    function: Callable[..., None],
    signature: tuple[Any, ...],
    threads: int,
    cc: tuple[int, int],
    options: Options = DEFAULT,
) -> str:
    """PTX of a kernel. RuntimeError if it holds float64 instructions."""
    from numba import cuda

    target = (*cc, "a") if options.arch_specific else cc
    blocks = options.min_blocks or int(options.arch_specific)  # setmaxnreg needs a bound
    bounds = (threads, blocks) if blocks else threads
    with _without_gpu(cc, options.cluster):
        ptx, _ = cuda.compile(
            function, signature, device=False, abi="numba", cc=target, fastmath=options.fastmath,
            launch_bounds=bounds,
        )  # fmt: skip
    if ".f64" in ptx:
        raise RuntimeError(
            f"{function.__name__}: float64 in the PTX (a float literal without np.float32?)"
        )
    return ptx


def to_ltoir(
    function: Callable[..., None],
    signature: tuple[Any, ...],
    threads: int,
    cc: tuple[int, int],
    options: Options,
) -> bytes:
    """LTO-IR of an arch_specific kernel. From PTX, nvJitLink compiles for later linking, where
    ptxas ignores setmaxnreg and then serialises wgmma (C7504, C7512); from LTO-IR it compiles the
    whole program."""
    from numba import cuda

    with _without_gpu(cc, options.cluster):
        ltoir, _ = cuda.compile(
            function, signature, device=False, abi="numba", cc=(*cc, "a"),
            fastmath=options.fastmath, launch_bounds=(threads, options.min_blocks or 1),
            output="ltoir",
        )  # fmt: skip
    return bytes(ltoir)


def _resources(ptx: str, log: str) -> Resources:
    if not log.strip():  # seen when two processes compiled one kernel at the same moment
        return Resources(-1, -1, -1, -1)
    used = re.search(r"[Uu]sed (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    # all that is left of the log where nvJitLink took ptxas's work from a cache of its own
    short = re.search(r"used \d+ barriers, (\d+) stack", log)
    if not used or not (frame or short):
        raise RuntimeError(f"nvJitLink reported no resources: {log}")
    stack, spills = frame.groups() if frame else (short[1], 0)  # pyright: ignore
    shared = re.findall(r"^\s*\.shared\s+(?:\.align\s+\d+\s+)?\.b8\s+\S+\[(\d+)\]", ptx, re.M)
    warnings = tuple(
        line for line in log.splitlines() if "warning" in line.lower() or "C75" in line
    )
    return Resources(int(used[1]), int(stack), int(spills), sum(map(int, shared)), warnings)


def to_cubin(ptx: str, arch: str, ltoir: bytes | None = None) -> tuple[bytes, Resources]:
    """Machine code for one target, from nvJitLink: of the LTO-IR if given, else of the PTX.
    RuntimeError with ptxas's message if it refuses."""
    from cuda.core import Linker, LinkerOptions, ObjectCode  # pyright: ignore

    options = LinkerOptions(
        arch=arch, verbose=True, ptxas_options=["-v"], link_time_optimization=ltoir is not None
    )
    code = ObjectCode.from_ptx(ptx.encode()) if ltoir is None else ObjectCode.from_ltoir(ltoir)
    linker = Linker(code, options=options)
    try:
        cubin = linker.link("cubin").code
    except Exception as error:
        raise RuntimeError(f"{arch}: {linker.get_error_log() or error}") from error
    return bytes(cubin), _resources(ptx, linker.get_info_log())


def _load(stem: Path, name: str) -> Compiled | None:
    """What the cache has, or None if either file is absent or damaged."""
    try:
        meta = json.loads(stem.with_suffix(".json").read_text())
        cubin = stem.with_suffix(".cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() != meta.pop("sha256"):
            return None
        resources = Resources(**{**meta.pop("resources"), "warnings": tuple(meta.pop("warnings"))})
        return Compiled(name=name, cubin=cubin, resources=resources, **meta)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def compile_kernel(
    function: Callable[..., None],
    signature: tuple[Any, ...],
    threads: int,
    cc: tuple[int, int],
    options: Options = DEFAULT,
) -> Compiled:
    """The cubin of a kernel, from the cache or compiled (0.5 to 4 s).

    RuntimeError if Numba, NVVM or ptxas refuse it, if it holds float64 instructions, or if ptxas
    had to serialise its wgmma.
    """
    name = function.__name__
    stem = cache_folder() / f"{name}-{cache_key(function, signature, threads, cc, options)}"
    if cached := _load(stem, name):
        return cached
    start = time.perf_counter()
    ptx = to_ptx(function, signature, threads, cc, options)
    middle = time.perf_counter()
    ltoir = None
    if _whole_program(options):
        ltoir = to_ltoir(function, signature, threads, cc, options)
    cubin, resources = to_cubin(ptx, arch_of(cc, options), ltoir)
    if any("wgmma" in warning or "setmaxnreg" in warning for warning in resources.warnings):
        raise RuntimeError(f"{name}: ptxas serialised the wgmma: {resources.warnings}")
    found = re.search(r"\.entry\s+([\w$]+)", ptx)
    if ltoir is not None:  # the mangled name counts compilations
        found = re.search(r"\.text\.([\w$]+)", cubin.decode("latin-1"))
    assert found
    entry = found[1]
    seconds = {"numba_seconds": middle - start, "link_seconds": time.perf_counter() - middle}
    result = Compiled(name=name, cubin=cubin, entry=entry, resources=resources, **seconds)
    meta = {"entry": entry, "sha256": hashlib.sha256(cubin).hexdigest(), **seconds}
    meta["resources"] = asdict(replace(resources, warnings=()))
    meta["resources"].pop("warnings")
    meta["warnings"] = resources.warnings
    write_atomically(stem.with_suffix(".cubin"), cubin)
    write_atomically(stem.with_suffix(".json"), json.dumps(meta).encode())
    return result
