"""A host with GPUs that is made up of files, and the part of NVIDIA's management library that belljar asks."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belljar.sandboxes import gpus

DRIVER = "580.159.04"
MEBIBYTE = 1024 * 1024


def uuid_of(number: int) -> str:
    return f"GPU-{number:08x}-9e84-2af3-9f62-348c99e9dadb"


def make_host(root: Path, count: int = 2, *, library: str = DRIVER, folder: str = "usr/lib/x86_64-linux-gnu") -> Path:
    """Make a tree with the files of NVIDIA's driver that belljar looks at, and return it."""
    write(root / "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}\n")
    for number in range(count):
        facts = (
            f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid_of(number)}\nDevice Minor: \t {number}\nGPU Excluded:\t No\n"
        )
        write(root / f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information", facts)
        write(root / f"dev/nvidia{number}", "", 0o666)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"):
        write(root / "dev" / name, "", 0o666)
    for number in (1, 2):
        write(root / f"dev/nvidia-caps/nvidia-cap{number}", "", 0o400)
    write(root / folder / f"libcuda.so.{library}", "")
    (root / folder / "libcuda.so.1").symlink_to(f"libcuda.so.{library}")
    write(root / "etc/ld.so.cache", f"glibc-ld.so.cache1.1\0/{folder}/libcuda.so.1\0")
    write(root / "usr/bin/nvidia-smi", "", 0o755)
    return root


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def stand_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have belljar look for GPUs in a tree."""
    monkeypatch.setattr(gpus, "ROOT", root)


class Library:
    """NVIDIA's management library: GPUs of 100,000 MB, of which the given ones are free, and processes with memory."""

    class NVMLError(Exception):
        pass

    def __init__(
        self, free_mb: Sequence[int] = (90_000, 90_000), instances: Sequence[tuple[str, int, int]] = ()
    ) -> None:
        self.free_mb = [*free_mb]
        self.held_mb: dict[int, int] = {}
        self.instances = instances
        """MIG instances of the first GPU: uuid, GPU instance, compute instance."""
        self.is_broken = False

    def nvmlInit(self) -> None:
        if self.is_broken:
            raise self.NVMLError("Driver/library version mismatch")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        if self.is_broken:
            raise self.NVMLError("GPU is lost")
        return len(self.free_mb)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return index

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return uuid_of(handle) if isinstance(handle, int) else handle[0]

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "NVIDIA H200" if isinstance(handle, int) else "NVIDIA H200 MIG 1g.18gb"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        free = self.free_mb[handle] if isinstance(handle, int) else 18_000
        return SimpleNamespace(used=(100_000 - free) * MEBIBYTE, free=free * MEBIBYTE, total=100_000 * MEBIBYTE)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        held = self.held_mb.items() if handle == 0 else ()
        return [SimpleNamespace(pid=pid, usedGpuMemory=size * MEBIBYTE) for pid, size in held]

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if handle != 0 or not self.instances:
            raise self.NVMLError("Not Supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> Any:
        if index >= len(self.instances):
            raise self.NVMLError("Not Found")
        return self.instances[index]

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:
        return handle[1]

    def nvmlDeviceGetComputeInstanceId(self, handle: Any) -> int:
        return handle[2]
