"""What `memory.offload` adds to the time of a step.

    micro-step   each block's copies run beside its work: what is longer than the work is seen
                     forward    weights in, residual out
                     backward   weights, residual and gradients in, gradients out
                 and of gradients that add up, those of a block come in after those of the block
                 two above were added to and went out: both use one of two staging buffers
    update       bound by the link: the norm reads the gradients, AdamW reads them again and reads
                 and writes the states; codes that are kept are made from the weights once more
    disk         what `memory.disk` moves is read and written by each update, slower than all else

Source   The order of the copies: offload/*.py and model/transformer.py. On an H200 whose link was
         measured: micro-steps of 7B and 14B within 1 %, of 1.5B with gradients on the host, whose
         copies take up to five times as long as the work, -2 to +5 %.
"""

import dataclasses
import math
from collections.abc import Iterable

from llmq_nb.config import Config
from llmq_nb.core.dtype import M_GROUP, DType
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.fp8 import keeps_quants
from llmq_nb.model.parameters import Parameter, layer_parameters, model_parameters
from llmq_nb.plan.link import Link
from llmq_nb.plan.places import (
    STAGES,
    disk_bytes,
    disk_records,
    has_master,
    kept_residuals,
    offloads_quants,
    place_of,
    staged_quants,
    staged_weights,
    streamed_states,
)

COPIED = 0.85
"""Of the link's rate, what copies of the states in slices reach; calibrated on an H200 (1.5B)."""
DISK = 2.0
"""GB/s that a disk reads and writes at the same time, together: a guess, they differ by far. The
virtual disk of an H200's host did 2.1 (bench/README.md)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a block, or of a whole update, at each place."""

    device: float = 0.0
    read: float = 0.0
    written: float = 0.0


def exposed_seconds(
    config: Config, model: ModelConfig, link: Link, forward: float, backward: float
) -> float:
    """Of an average micro-step, what the copies take beyond the work of the blocks.

    forward, backward: seconds of one block's work.
    """
    if not set(config.memory.offload) & {"master", "quants", "gradients", "residual"}:
        return 0.0
    weights, gradients = _weight_bytes(config, model), _gradient_bytes(config, model)
    residual = 0.0
    if kept_residuals(config, model):
        b = config.batch
        residual = b.micro_batch * b.seq_len * model.C * DType(config.precision.dtype).itemsize
    # the first block comes before any work, the last gradients leave after it
    ends = weights / (link.to_device * 1e9) + gradients / (link.to_host * 1e9)
    seen = max(0.0, link.copies(weights, residual) - forward)

    def behind(fetched: float) -> float:
        # a staging buffer is filled, added to and emptied for every second block
        chain = backward + (fetched / link.to_device + fetched / link.to_host) / 1e9
        copies = link.copies(weights + residual + fetched, gradients)
        return max(0.0, max(copies, chain / STAGES) - backward)

    share = 1 - 1 / config.batch.grad_accumulation  # the first micro-step adds to nothing
    again = share * behind(gradients) + (1 - share) * behind(0.0)
    return ends + model.L * (seen + again)


def _weight_bytes(config: Config, model: ModelConfig) -> float:
    """Brought to the device for one block, on average."""
    size = sum(math.prod(p.shape) for p in layer_parameters(model, 0) if p.kind == "matrix")
    values = len(staged_weights(config, model)) * DType(config.precision.dtype).itemsize
    return size * (values + len(staged_quants(config, model))) / model.L


def _gradient_bytes(config: Config, model: ModelConfig) -> float:
    if "gradients" not in config.memory.offload:
        return 0.0
    p = config.precision
    itemsize = DType(p.gradient_accumulation or p.dtype).itemsize
    return itemsize * sum(math.prod(q.shape) for q in layer_parameters(model, 0))


def norm_traffic(config: Config, model: ModelConfig) -> Traffic:
    """Every gradient is read."""
    p = config.precision
    itemsize = DType(p.gradient_accumulation or p.dtype).itemsize
    found = Traffic()
    for q, n in alike(model_parameters(model)):
        found = _add(found, place_of(config, "gradients", q), n * itemsize * math.prod(q.shape))
    return found


def alike(parameters: Iterable[Parameter]) -> list[tuple[Parameter, int]]:
    """One of each kind that cost and place tell apart, and how many there are."""
    found: dict[tuple[object, ...], tuple[Parameter, int]] = {}
    for p in parameters:
        key = (p.shape, p.kind, p.layer is None)
        found[key] = p, found.get(key, (p, 0))[1] + 1
    return list(found.values())


def update_traffic(config: Config, p: Parameter) -> Traffic:
    """AdamW on one parameter: the gradient is read, states are read and written."""
    o, dtype, n = config.optimizer, DType(config.precision.dtype), math.prod(p.shape)
    grad = DType(config.precision.gradient_accumulation or dtype)
    found = _add(Traffic(), place_of(config, "gradients", p), n * grad.itemsize)
    if has_master(config):
        found = _add(found, place_of(config, "weights", p), 0, n * dtype.itemsize)
    sizes: dict[str, float] = {"master": DType(o.master).itemsize, "v": DType(o.v).itemsize}
    sizes["m"] = DType(o.m).itemsize + (4 / M_GROUP if o.m == "e4m3" else 0)
    for state, itemsize in sizes.items():
        group = "weights" if state == "master" and not has_master(config) else state
        found = _add(found, place_of(config, group, p), n * itemsize, n * itemsize)
    return found


def update_seconds(config: Config, link: Link, traffic: Traffic) -> float:
    """On the link, of AdamW over all parameters or one."""
    if not traffic.read and not traffic.written:
        return 0.0
    if streamed_states(config):
        return link.copies(traffic.read, traffic.written) / COPIED
    return link.kernels(traffic.read, traffic.written)


def disk_seconds(config: Config, model: ModelConfig) -> float:
    """Of an update's reading and writing of what is on the disk."""
    return 2 * disk_bytes(disk_records(config, model)) / (DISK * 1e9)


def codes_traffic(config: Config, p: Parameter) -> Traffic:
    """The kept codes of one weight, after its update: its values are read again."""
    n = math.prod(p.shape)
    itemsize = DType(config.precision.dtype).itemsize
    found = _add(Traffic(), place_of(config, "weights", p), n * itemsize)
    if not keeps_quants(config):
        return Traffic()
    host = offloads_quants(config)
    return _add(found, "host" if host else "device", 0, n if host else 2 * n)


def _add(to: Traffic, place: str, read: float, written: float = 0.0) -> Traffic:
    if place == "device":
        return dataclasses.replace(to, device=to.device + read + written)
    return dataclasses.replace(to, read=to.read + read, written=to.written + written)
