"""The load of the machine: by the container's quota where there is one, and never in the way of anything."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from fulmen_runner.leases.codec import write_load
from fulmen_runner.slots.load import GpuLoad, Load, LoadMeter
from fulmen_runner.slots.machine import Gpus, Machine

LIMIT_S = 20.0


def container(
    folder: Path, *, quota: str = "50000 100000", used_us: int = 0, limit: str = "1000000", used: int = 700_000
) -> None:
    """Writes the files of a control group."""
    (folder / "cpu.max").write_text(f"{quota}\n")
    (folder / "cpu.stat").write_text(f"usage_usec {used_us}\nuser_usec 1\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("anon 5\ninactive_file 200000\n")


def test_a_container_is_measured_by_its_quota(tmp_path: Path) -> None:
    now = [100.0]
    container(tmp_path)
    machine = Machine(cgroup=tmp_path, clock=lambda: now[0])
    now[0] += 10.0
    container(tmp_path, used_us=1_250_000)
    load = machine.measure()
    # 1.25 s of the 5 s that half a processor has in 10 s.
    assert load.cpu == pytest.approx(0.25)
    assert (load.memory_bytes, load.memory_limit_bytes) == (500_000, 1_000_000)
    now[0] += 10.0
    assert machine.measure().cpu == 0.0
    now[0] += 1.0
    container(tmp_path, used_us=9_000_000)
    assert machine.measure().cpu == 1.0


def test_a_container_without_limits_has_those_of_the_machine(tmp_path: Path) -> None:
    now = [0.0]
    container(tmp_path, quota="max 100000", limit="max")
    machine = Machine(cgroup=tmp_path, clock=lambda: now[0])
    now[0] = 2.0
    container(tmp_path, quota="max 100000", limit="max", used_us=1_000_000)
    load = machine.measure()
    assert load.cpu == pytest.approx(0.5 / len(os.sched_getaffinity(0)))
    assert load.memory_limit_bytes == psutil.virtual_memory().total


def test_outside_of_a_container_the_runner_and_its_children_are_measured(tmp_path: Path) -> None:
    load = Machine(cgroup=tmp_path).measure()
    assert 0.0 <= load.cpu <= 1.0
    assert psutil.Process().memory_info().rss / 2 < load.memory_bytes < load.memory_limit_bytes
    assert load.memory_limit_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize("text", ["", "garbage", "-1", "1 0x"])
def test_unreadable_files_are_no_error(tmp_path: Path, text: str) -> None:
    container(tmp_path)
    for path in tmp_path.iterdir():
        path.write_text(text)
    load = Machine(cgroup=tmp_path).measure()
    assert 0.0 <= load.cpu <= 1.0
    assert load.memory_bytes >= 0


def nvml(**functions: object) -> ModuleType:
    """Makes a management library that answers so."""
    module = ModuleType("pynvml")
    error = type("NVMLError", (Exception,), {})

    def refuse(*_: object) -> None:
        raise error("not supported")

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(used=device + 1, total=100),
        "nvmlDeviceGetName": lambda device: "NVIDIA H200",
        "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=40),
    }
    for name, answer in {**answers, **functions}.items():
        setattr(module, name, refuse if answer is None else answer)
    module.NVMLError = error  # type: ignore[attr-defined]  # as the library has it
    return module


def test_gpus_are_measured_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    first, second = Gpus().measure()
    assert first == GpuLoad(model="NVIDIA H200", utilization=0.4, memory_bytes=1, memory_limit_bytes=100)
    assert second.memory_bytes == 2
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetUtilizationRates=None))
    assert [gpu.utilization for gpu in Gpus().measure()] == [0.0, 0.0]


@pytest.mark.parametrize("missing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_a_gpu_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(**{missing: None}))
    assert list(Gpus().measure()) == []


def test_without_the_library_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list(Gpus().measure()) == []


async def test_a_measurement_that_hangs_blocks_neither_readers_nor_the_stop() -> None:
    hanging, began = threading.Event(), threading.Event()
    known = Load(cpu=0.5, memory_bytes=1, memory_limit_bytes=2)
    count = 0

    def measure() -> Load:
        nonlocal count
        count += 1
        if count > 1:
            began.set()
            hanging.wait(LIMIT_S)
        return known

    meter = LoadMeter(measure, interval_s=0.001)
    assert meter.latest is None
    role = asyncio.create_task(meter.run())
    assert await asyncio.to_thread(began.wait, LIMIT_S)
    assert meter.latest is known
    role.cancel()
    await asyncio.wait([role], timeout=LIMIT_S)
    assert role.cancelled()
    hanging.set()


def test_a_measurement_is_written_as_the_contract_has_it() -> None:
    gpu = GpuLoad(model="m", utilization=0.5, memory_bytes=3, memory_limit_bytes=4)
    message = write_load(Load(cpu=0.25, memory_bytes=1, memory_limit_bytes=2, gpus=[gpu]))
    assert (message.cpu_ratio, message.memory_bytes, message.memory_limit_bytes) == (0.25, 1, 2)
    assert (message.gpus[0].model, message.gpus[0].utilization_ratio) == ("m", 0.5)
    assert (message.gpus[0].memory_bytes, message.gpus[0].memory_limit_bytes) == (3, 4)
