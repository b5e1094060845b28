"""What a machine found fastest: the products' algorithms and attention's tile shapes.

The choices are integers by name, kept in one file for a GPU model and library version, and with
every run, whose own choices come first: a resumed run has the bits it started with. Products that
have no choice yet are timed when a run starts; attention keeps its defaults until
`llmq-nb compile --tune` times both anew, which changes new runs only.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmq_nb.core.device import Device, allocate, free, synchronize_stream
from llmq_nb.core.errors import UserError
from llmq_nb.core.sizes import format_bytes
from llmq_nb.kernels.attention_choice import (
    KERNELS,
    AttentionShape,
    AttentionTimer,
    default_numbers,
    is_attention,
    timing_bytes,
)
from llmq_nb.kernels.attention_launch import candidates
from llmq_nb.kernels.cache import cache_folder, write_atomically
from llmq_nb.kernels.matmul import WORKSPACE_BYTES, library_version
from llmq_nb.kernels.products import Products, best_of
from llmq_nb.model.engine_cuda.ops import CudaOps

Choices = dict[str, int]
VERSION = 4
"""Of the file: 1 had FP8 products timed on codes some of which were no numbers, 2 all products in
short runs, 3 products with SwiGLU in an older kernel."""
RESERVE = 256 << 20
"""Device memory left free while timing, for modules and cuBLASLt [bytes]."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One kernel's or product's candidates."""

    name: str
    seconds: list[float]
    """Of a launch with each candidate, infinite if ruled out; the first is the default."""
    labels: list[str]
    numbers: Sequence[int]
    """Under which the candidates are kept."""

    @property
    def best(self) -> int:
        """Place of the fastest, if it is clearly faster than the default."""
        return best_of(self.seconds)

    @property
    def chosen(self) -> int:
        return self.numbers[self.best]


# ---- the machine's file ------------------------------------------------------------------------
def _file(device: Device) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in device.name)
    return cache_folder() / f"products-{name}-cublaslt-{library_version()}-v{VERSION}.json"


def machine_tuning(device: Device) -> Choices:
    """The choices made on this machine before: later runs have the same bits, and start faster."""
    try:
        found = json.loads(_file(device).read_text(encoding="utf-8"))
        return {str(shape): int(choice) for shape, choice in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):  # none yet, or a torn file: time again
        return {}


def keep_machine_tuning(device: Device, choices: Choices, *, replace: bool = False) -> None:
    """Add new shapes' choices; those that were there stay, unless they are to be replaced. A run's
    attention shapes are not added: they are defaults, or came from here."""
    before = machine_tuning(device)
    if replace:
        merged = before | choices
    else:
        merged = {k: v for k, v in choices.items() if not is_attention(k)} | before
    write_atomically(_file(device), json.dumps(merged, indent=1, sort_keys=True).encode())


def known_tuning(device: Device, saved: Choices | None) -> Choices:
    """What a run starts with. saved: the choices of an earlier start of it, which come first; a run
    that has none for its attention started with the default shapes."""
    machine = machine_tuning(device)
    if saved is None:
        return machine
    return {k: v for k, v in machine.items() if not is_attention(k)} | saved


def keep_apart(products: Products, saved: Choices | None) -> None:
    """A run that was started before SwiGLU could be part of a product goes on without: its choices
    have the product alone. Call it when the shapes in use are known."""
    for shape in products.shapes:
        alone = str(dataclasses.replace(shape, swiglu=False))
        if saved and shape.swiglu and alone in saved and str(shape) not in saved:
            products.choices[str(shape)] = 0
            products.plan(shape).choose(0)


# ---- llmq-nb compile --tune --------------------------------------------------------------------
def tune(ops: CudaOps, progress: Callable[[str], None]) -> list[Timed]:
    """Time every product and attention kernel of a run whose steps were prepared, and keep the
    choices for the machine. UserError where the GPU has too little free memory.

    progress: takes a line before each.
    """
    device, m = ops.device, ops.model
    shape = AttentionShape(ops.B, ops.T, m.H, m.G, m.D)
    with_attention = ops.config.precision.dtype == "bf16"
    shapes = ops.products.timing_order()
    products = max((s.timing_bytes for s in shapes), default=0)
    needed = max(products, timing_bytes(shape) if with_attention else 0) + WORKSPACE_BYTES
    available = device.free_bytes()
    if needed + RESERVE > available:
        short = format_bytes(needed + RESERVE - available)
        raise UserError(
            f"out of memory on {device.name}: tuning is {short} short",
            where="compile --tune",
            mend="end what else runs on the GPU, or lower batch.micro_batch",
        )
    total, found = len(shapes) + with_attention * len(KERNELS), []
    memory = allocate(needed)
    try:
        ops.products.workspace = memory + needed - WORKSPACE_BYTES
        ops.fill_memory(memory, needed - WORKSPACE_BYTES)
        for i, product in enumerate(shapes):
            progress(f"timing {i + 1} of {total}: {product}")
            seconds = ops.products.times(ops.products.plan(product), memory, stream=ops.stream)
            labels = [f"algorithm {k}" for k in range(len(seconds))]
            found.append(Timed(str(product), seconds, labels, range(len(seconds))))
            ops.products.plan(product).choose(found[-1].chosen)  # part of a swiglu shape's timing
        if with_attention:
            ops.fill_memory(memory, needed - WORKSPACE_BYTES)
            timer = AttentionTimer(shape, device.cc, memory, ops.stream)
            default = default_numbers(shape, device.cc, device.multiprocessors)
            for kernel, tiles in candidates(m.D, device.cc).items():
                progress(f"timing {len(found) + 1} of {total}: {shape.name(kernel)}")
                first = default[kernel]
                numbers = [first, *(i for i in tiles if i != first)]
                order = [tiles[i] for i in numbers]
                seconds = timer.seconds(kernel, order)
                labels = [str(tile) for tile in order]
                found.append(Timed(shape.name(kernel), seconds, labels, numbers))
        synchronize_stream(ops.stream)
    finally:
        free(memory)
    keep_machine_tuning(device, {t.name: t.chosen for t in found}, replace=True)
    return found
