"""What a process uses, as Linux's /proc tells it; nothing but zeros where there is none."""

import contextlib
import os
from pathlib import Path

_MB = 1024 * 1024


class Usage:
    """One process, and what it had used when the cell began. Of its children, those that have ended are counted."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._cpu_before_s = 0.0

    def begin(self) -> None:
        """A cell begins."""
        self._cpu_before_s = self._cpu_s()
        # Starts VmHWM anew (proc(5), clear_refs); where it is refused, the peak is the session's.
        with contextlib.suppress(OSError):
            (self._folder / "clear_refs").write_text("5")

    def cpu_s(self) -> float:
        """Processor time since `begin`."""
        return max(0.0, self._cpu_s() - self._cpu_before_s)

    def peak_memory_mb(self) -> float:
        """The most that was resident since `begin`."""
        try:
            lines = (self._folder / "status").read_text(errors="replace").splitlines()
        except OSError:
            return 0.0
        peaks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(peaks[0]) / 1024 if peaks else 0.0

    def memory_mb(self) -> float:
        """What is resident now."""
        try:
            pages = int((self._folder / "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0.0
        return pages * os.sysconf("SC_PAGESIZE") / _MB

    def _cpu_s(self) -> float:
        try:
            text = (self._folder / "stat").read_text(errors="replace")
        except OSError:
            return 0.0
        # The name is in brackets and may hold blanks: fields are counted from the last bracket. utime to cstime.
        fields = text.rpartition(")")[2].split()[11:15]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")
