"""What a run's log says of its device, once at the start and every few steps after."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from llmq_nb.config import Config
from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import Parameter
from llmq_nb.plan.mfu import peak_of, seconds_per_token
from llmq_nb.report.device import DeviceMonitor, open_monitor
from llmq_nb.report.jsonl import JsonlLog
from llmq_nb.train.trainer import Trainer


def start_facts(trainer: Trainer) -> dict[str, Any]:
    """Facts that the report needs beside the steps, by name.

    planned_bytes, planned_host_bytes: our allocations on a device and in pinned memory.
    peak_tokens_per_second: at a model FLOP utilisation of 1; absent for a device without peaks.
    """
    engine: Any = trainer.engine
    facts: dict[str, Any] = {
        "device": trainer.device.kind,
        "parameters": sum(_count(s.parameter) for s in engine.states),
        "planned_bytes": engine.plan.total,
        "planned_host_bytes": engine.plan.host_total,
        "total_steps": trainer.total_steps,
    }
    if trainer.device.kind == "cuda":
        name = engine.device.name
        facts["device_name"] = name
        peak = peak_tokens_per_second(trainer.config, trainer.model, name)
        if peak is not None:
            facts["peak_tokens_per_second"] = peak * trainer.config.world_size
    return facts


def _count(parameter: Parameter) -> int:
    """Without the rows that pad the vocabulary."""
    rows = sum(view.stop - view.start for view in parameter.views)
    return rows * math.prod(parameter.shape[1:])


def peak_tokens_per_second(config: Config, model: ModelConfig, device_name: str) -> float | None:
    """What one such device could do at its peak; None where its peaks are not known."""
    try:
        peak = peak_of(device_name)
    except UserError:
        return None
    products = DType.E4M3 if config.precision.matmul == "e4m3" else DType.BF16
    return 1 / seconds_per_token(model, config.batch.seq_len, products, peak)


@contextlib.contextmanager
def watch_devices(trainer: Trainer, log: JsonlLog) -> Iterator[DeviceMonitor | None]:
    """The monitor of the run's GPUs, or None: on the cpu, when not wanted, where NVML is absent.

    What it was still asked for at the end is logged on leaving.
    """
    if trainer.device.kind != "cuda" or not trainer.config.log.device_every:
        yield None
        return
    from llmq_nb.core.device import open_device, pci_bus_id

    ordinals = dict.fromkeys(trainer.config.parallel.devices or (0,))
    monitor, why = open_monitor([pci_bus_id(open_device(n)) for n in ordinals])
    if monitor is None:
        log.info(why)
        yield None
        return
    try:
        yield monitor
    finally:
        monitor.close()
        for found in monitor.collect():
            log.device(found)
