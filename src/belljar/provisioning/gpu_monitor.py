"""The memory of GPUs and which processes hold it, by NVIDIA's management library.

The library is asked through `nvidia-ml-py`, the extra `gpu`, which is imported when it is first needed. Without it, or
without a driver, every answer is empty: sessions work, and nobody knows how much GPU memory they hold. Calls take about
a millisecond once the library is open, and may block for longer where the driver has to wake a GPU: call them in a
thread. Knows nothing of sessions.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from belljar.distribution import install_extra
from belljar.sandboxes.gpus import Partition
from belljar.settings import MEBIBYTE

INSTALL = install_extra("gpu")
PARTITIONS_S = 30.0
_MIG_ON = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of one GPU, in MB."""

    used_mb: float
    free_mb: float
    total_mb: float


class GpuMonitor:
    """Asks the library, which it opens once and again after a failure. May be called from any thread."""

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._is_open = False
        self._lock = threading.Lock()
        self._partitions: list[Partition] = []
        self._partitions_at = -PARTITIONS_S
        self.failure = ""
        """Why nothing is known; empty when something is, or nobody asked yet."""

    def memory(self) -> dict[str, GpuMemory]:
        """Return the memory of each GPU and MIG instance, by uuid."""
        return self._ask(_memory, {})

    def processes(self) -> dict[int, float]:
        """Return the GPU memory in MB of each process that holds any, on all GPUs together, by pid."""
        return self._ask(_processes, {})

    def partitions(self) -> list[Partition]:
        """Return the MIG instances of all GPUs that are partitioned, as they were at most `PARTITIONS_S` ago.

        Remembered, because it is asked on the event loop; only an administrator changes them, with no GPU in use.
        """
        if time.monotonic() - self._partitions_at > PARTITIONS_S:
            self._partitions, self._partitions_at = self._ask(_partitions, []), time.monotonic()
        return self._partitions

    def _ask(self, question: Callable[[Any], T], otherwise: T) -> T:
        """Return the answer; `otherwise` where the library fails, which the next call then opens again."""
        with self._lock:
            if self._library is None:
                try:
                    self._library = import_module("pynvml")
                except ImportError:
                    self._library = _NoLibrary()
            library = self._library
            try:
                if not self._is_open:
                    library.nvmlInit()
                    self._is_open = True
                answer = question(library)
            except library.NVMLError as error:
                self.failure = str(error)
                self._is_open = False
                with contextlib.suppress(library.NVMLError):
                    library.nvmlShutdown()
                return otherwise
            self.failure = ""
            return answer


def _memory(library: Any) -> dict[str, GpuMemory]:
    found: dict[str, GpuMemory] = {}
    for uuid, handle in _devices(library):
        with contextlib.suppress(library.NVMLError):
            memory = library.nvmlDeviceGetMemoryInfo(handle)
            found[uuid] = GpuMemory(*(size / MEBIBYTE for size in (memory.used, memory.free, memory.total)))
    return found


def _processes(library: Any) -> dict[int, float]:
    found: dict[int, float] = {}
    for _, handle in _devices(library):
        with contextlib.suppress(library.NVMLError):
            for process in library.nvmlDeviceGetComputeRunningProcesses(handle):
                # None where the driver does not tell, as in some virtual machines.
                size = (process.usedGpuMemory or 0) / MEBIBYTE
                found[process.pid] = found.get(process.pid, 0.0) + size
    return found


def _partitions(library: Any) -> list[Partition]:
    found: list[Partition] = []
    for parent, handle in _whole(library):
        for uuid, instance in _instances(library, handle):
            with contextlib.suppress(library.NVMLError):
                found.append(
                    Partition(
                        uuid,
                        parent,
                        _text(library.nvmlDeviceGetName(instance)),
                        library.nvmlDeviceGetGpuInstanceId(instance),
                        library.nvmlDeviceGetComputeInstanceId(instance),
                    )
                )
    return found


def _devices(library: Any) -> Iterator[tuple[str, Any]]:
    """Yield what can be used: GPUs, and of a partitioned one its instances."""
    for uuid, handle in _whole(library):
        yield from [*_instances(library, handle)] or [(uuid, handle)]


def _whole(library: Any) -> Iterator[tuple[str, Any]]:
    for index in range(library.nvmlDeviceGetCount()):
        with contextlib.suppress(library.NVMLError):  # one that fell off the bus
            handle = library.nvmlDeviceGetHandleByIndex(index)
            yield _text(library.nvmlDeviceGetUUID(handle)), handle


def _instances(library: Any, handle: Any) -> Iterator[tuple[str, Any]]:
    try:
        mode, _ = library.nvmlDeviceGetMigMode(handle)
        count = library.nvmlDeviceGetMaxMigDeviceCount(handle) if mode == _MIG_ON else 0
    except library.NVMLError:  # a GPU that cannot be partitioned
        return
    for index in range(count):
        with contextlib.suppress(library.NVMLError):  # a place that is empty
            instance = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            yield _text(library.nvmlDeviceGetUUID(instance)), instance


class _NoLibrary:
    """Takes the place of the library where it is not installed."""

    class NVMLError(Exception):
        """Raised for every call."""

    def nvmlInit(self) -> None:  # noqa: N802 - the library's name
        """Raise, because there is no library."""
        raise self.NVMLError(f"nvidia-ml-py is not installed: {INSTALL}")

    def nvmlShutdown(self) -> None:  # noqa: N802 - the library's name
        """Do nothing."""


def _text(value: str | bytes) -> str:
    """Return a text that earlier versions of the library return as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def is_of_session(pid: int, kernel_pid: int) -> bool:
    """Return whether a process belongs to the session of a kernel: it is in its pid namespace, or descends from it."""
    if pid == kernel_pid:
        return True
    own, kernels = _pid_namespace("self"), _pid_namespace(kernel_pid)
    if kernels and kernels != own:
        return _pid_namespace(pid) == kernels
    return kernel_pid in _ancestors(pid)


def _pid_namespace(pid: int | str) -> int:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return 0


def _ancestors(pid: int) -> Iterator[int]:
    for _ in range(64):
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            pid = int(text.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
        yield pid
