"""What the GPUs do during a run: power, clocks, throttling, memory, PCIe, through nvidia-ml-py.

A thread of its own asks the driver (NVML takes 40 ms for the PCIe counters of one GPU), so a step
never waits: `request` returns at once, `collect` hands over what has arrived. A request that comes
while one is being answered is dropped. A figure that a card does not have is None.

Source   NVIDIA's NVML API reference: units and the bits of the clock event reasons.
"""

import importlib
import queue
import threading
from collections.abc import Sequence
from typing import Any, Self

from llmq_nb.report.metrics import DeviceFacts, DeviceMetrics

PACKAGE = "nvidia-ml-py"
REASONS = {
    0x2: "applications clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Why clocks are below their highest; an idle GPU (bit 0) is none of it."""
SM, MEMORY = 1, 2
"""NVML's clock domains."""
SENT, RECEIVED = 0, 1
"""NVML's PCIe counters, as the GPU sees it [KiB/s over the last 20 ms]."""


class DeviceMonitor:
    """Asks for the GPUs of these PCI bus ids; a context manager that ends its thread.

    nvml: nvidia-ml-py's module `pynvml`, or what stands for it. Raises whatever it raises where the
    driver has no NVML: `open_monitor` is the forgiving way.
    """

    def __init__(self, bus_ids: Sequence[str], nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [nvml.nvmlDeviceGetHandleByPciBusId(bus_id) for bus_id in bus_ids]
        self._wanted: queue.Queue[int | None] = queue.Queue(1)
        self._done: queue.SimpleQueue[DeviceMetrics] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="nvml", daemon=True)
        self._thread.start()

    def request(self, step: int) -> None:
        """Ask for the facts of this moment, after step `step`. Never waits."""
        try:
            self._wanted.put_nowait(step)
        except queue.Full:
            pass

    def collect(self) -> list[DeviceMetrics]:
        """What has arrived since the last call."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def close(self) -> None:
        """End the thread after what it is doing."""
        if self._thread.is_alive():
            self._wanted.put(None)
            self._thread.join()
            self._nvml.nvmlShutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> None:
        while (step := self._wanted.get()) is not None:
            devices = tuple(device_facts(self._nvml, i, h) for i, h in enumerate(self._handles))
            self._done.put(DeviceMetrics(step=step, devices=devices))


def open_monitor(bus_ids: Sequence[str]) -> tuple[DeviceMonitor | None, str]:
    """(a monitor, ""), or (None, why there is none): it is never a reason not to train."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, f"power, clocks and PCIe are not logged: pip install {PACKAGE}"
    try:
        return DeviceMonitor(bus_ids, nvml), ""
    except Exception as error:  # NVMLError of a driver without NVML (WSL, containers)
        return None, f"power, clocks and PCIe are not logged: {error}"


def device_facts(nvml: Any, index: int, handle: Any) -> DeviceFacts:
    """The facts of one GPU now."""

    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *args)
        except Exception:  # NVMLError_NotSupported, or a function that this NVML does not have
            return None

    def scaled(value: Any, factor: float) -> float | None:
        return None if value is None else float(value * factor)

    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # its name before driver 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    rates, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
    throttled = None
    if reasons is not None:
        throttled = tuple(name for bit, name in REASONS.items() if int(reasons) & bit)
    return DeviceFacts(
        index=index,
        power=scaled(ask("nvmlDeviceGetPowerUsage"), 1e-3),
        power_limit=scaled(ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
        sm_clock=ask("nvmlDeviceGetClockInfo", SM),
        memory_clock=ask("nvmlDeviceGetClockInfo", MEMORY),
        temperature=ask("nvmlDeviceGetTemperature", 0),
        utilization=None if rates is None else rates.gpu / 100,
        memory=None if memory is None else int(memory.used),
        throttled=throttled,
        pcie_sent=scaled(ask("nvmlDeviceGetPcieThroughput", SENT), 1024),
        pcie_received=scaled(ask("nvmlDeviceGetPcieThroughput", RECEIVED), 1024),
    )
