"""nvidia-ml-py as tests have it: two GPUs, whatever machine they run on."""

from __future__ import annotations

from types import SimpleNamespace

from fitgpt.core.units import MiB
from fitgpt.hardware.nvidia import GpuReading

TWO = (GpuReading(0, "NVIDIA H200", uuid="GPU-aaaa-1"), GpuReading(1, "NVIDIA GeForce RTX 4070", uuid="GPU-aabb-2"))


class FakeNvml:
    """nvidia-ml-py with two GPUs, of which the second supports few queries."""

    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED = 12, 9
    nvmlMemory_v2 = 0x2000028

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self, init_error: int | None = None) -> None:
        self.init_error = init_error
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.NVMLError(self.init_error)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes | str:
        return b"NVIDIA H200" if handle == 0 else "NVIDIA GeForce RTX 4070"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return TWO[handle].uuid or ""

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def _only_first(self, handle: int) -> None:
        if handle == 1:
            raise self.NVMLError(3)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        self._only_first(handle)
        return 9, 0

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:
        self._only_first(handle)
        return SimpleNamespace(total=100 * MiB, free=60 * MiB, used=30 * MiB, reserved=10 * MiB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        self._only_first(handle)
        return [SimpleNamespace(pid=7, usedGpuMemory=20 * MiB), SimpleNamespace(pid=8, usedGpuMemory=None)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        self._only_first(handle)
        return [SimpleNamespace(pid=5, usedGpuMemory=2 * MiB)]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        if pid == 8:
            raise self.NVMLError(6)
        return b"python"


class CountingNvml(FakeNvml):
    """The second GPU supports no counter."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._only_first(handle)
        return SimpleNamespace(gpu=97, memory=50)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._only_first(handle)
        return 187_400

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        self._only_first(handle)
        return 200_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._only_first(handle)
        return 71

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        self._only_first(handle)
        return 2475

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        self._only_first(handle)
        return 2550

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        self._only_first(handle)
        return 0x4 | 0x20 | 0x1
