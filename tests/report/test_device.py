"""DeviceMonitor over a stand-in for NVML: units, what is missing, and that a step never waits."""

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from llmq_nb.report.device import DeviceMonitor, device_facts, open_monitor
from llmq_nb.report.jsonl import JsonlLog, read_log


class Nvml:
    """NVML's functions as its reference has them: milliwatts, MHz, KiB/s, bit masks."""

    def __init__(self) -> None:
        self.go, self.asked, self.open = threading.Event(), threading.Event(), 0
        self.go.set()

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        return bus_id

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self.asked.set()
        assert self.go.wait(30)
        return {"0000:3B:00.0": 412_345, "0000:5E:00.0": 1_000}[handle]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: str, domain: int) -> int:
        return {1: 1980, 2: 3201}[domain]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return {0: 61}[sensor]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return types.SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return types.SimpleNamespace(total=80 << 30, free=1, used=5 << 30)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 0x1 | 0x4 | 0x40

    def nvmlDeviceGetPcieThroughput(self, handle: str, counter: int) -> int:
        return {0: 1000, 1: 2000}[counter]


BUSES = ["0000:3B:00.0", "0000:5E:00.0"]


def test_units() -> None:
    f = device_facts(Nvml(), 0, BUSES[0])
    assert f.power == pytest.approx(412.345) and f.power_limit == 700.0
    assert (f.sm_clock, f.memory_clock, f.temperature) == (1980, 3201, 61)
    assert f.utilization == 0.97 and f.memory == 5 << 30
    assert f.throttled == ("power cap", "thermal (hardware)")
    assert (f.pcie_sent, f.pcie_received) == (1_024_000.0, 2_048_000.0)


def test_what_a_card_does_not_have_is_none() -> None:
    class Old(Nvml):
        """No PCIe counters, no power, and the mask of reasons by its older name."""

        nvmlDeviceGetCurrentClocksEventReasons: Any = None

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
            return 0x1

        def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
            raise RuntimeError("Not Supported")

        nvmlDeviceGetPcieThroughput = nvmlDeviceGetPowerUsage  # pyright: ignore

    f = device_facts(Old(), 3, BUSES[0])
    assert f.index == 3 and f.power is None and f.pcie_sent is None and f.pcie_received is None
    assert f.throttled == () and f.temperature == 61


def test_a_step_never_waits_for_the_driver(tmp_path: Path) -> None:
    nvml = Nvml()
    nvml.go.clear()
    with DeviceMonitor(BUSES, nvml) as monitor:
        monitor.request(1)
        assert nvml.asked.wait(30)
        for step in range(2, 50):  # one is being answered, one waits, the others are dropped
            monitor.request(step)
        assert monitor.collect() == []
        nvml.go.set()
    found = monitor.collect()
    assert [m.step for m in found] == [1, 2] and nvml.open == 0
    assert [d.power for d in found[0].devices] == [pytest.approx(412.345), 1.0]
    assert [d.index for d in found[1].devices] == [0, 1]
    with JsonlLog(tmp_path / "log.jsonl") as log:
        for metrics in found:
            log.device(metrics)
    record = read_log(tmp_path / "log.jsonl")[1]
    assert record["log"] == "device" and record["step"] == 2
    assert record["devices"][0]["throttled"] == ["power cap", "thermal (hardware)"]


def test_without_the_package_or_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor, why = open_monitor(BUSES)
    assert monitor is None and "pip install nvidia-ml-py" in why

    class Broken(Nvml):
        def nvmlInit(self) -> None:
            raise RuntimeError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", Broken())
    monitor, why = open_monitor(BUSES)
    assert monitor is None and "Driver Not Loaded" in why
