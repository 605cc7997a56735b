"""What a process uses, as Linux's /proc tells it; nothing but zeros where there is none."""

import contextlib
import os
from pathlib import Path


class Usage:
    """One process. Its files in /proc stay open, so that they can never mean a later process of the same number."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._status = self._open("status", os.O_RDONLY)
        self._clear = self._open("clear_refs", os.O_WRONLY)

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(self._folder / name, flags | os.O_CLOEXEC)
        except OSError:
            return -1

    def reset_peak(self) -> None:
        """Start the peak anew (proc(5), clear_refs); where that is refused, the peak is the session's."""
        with contextlib.suppress(OSError):
            os.write(self._clear, b"5")

    def peak_memory_mb(self) -> float:
        """The most that was resident since `reset_peak`."""
        return self._kilobytes(b"VmHWM:") / 1024

    def memory_mb(self) -> float:
        """What is resident now."""
        return self._kilobytes(b"VmRSS:") / 1024

    def _kilobytes(self, name: bytes) -> int:
        try:
            text = os.pread(self._status, 4096, 0)
            return int(text.partition(name)[2].split(None, 1)[0])
        except (OSError, ValueError, IndexError):
            return 0

    def cpu_s(self) -> float:
        """Processor time so far, with that of children that have ended; in steps of 10 ms."""
        try:
            text = (self._folder / "stat").read_text(errors="replace")
        except OSError:
            return 0.0
        # The name is in brackets and may hold blanks: fields are counted from the last bracket. utime to cstime.
        fields = text.rpartition(")")[2].split()[11:15]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Release the files; may be called twice."""
        for descriptor in (self._status, self._clear):
            if descriptor >= 0:
                os.close(descriptor)
        self._status = self._clear = -1
