"""Kills processes that are being started when the server dies: a shell that outlives the server has their pids.

bubblewrap asks to be killed with its parent, but only some milliseconds after its start, and what it has started in
turn asks for the same later still. A server that is killed in between would leave them to the host's init for good.
"""

import logging
import os
import subprocess
import threading

# The shell detaches from its parent, so that the server has no child to know of. A pid may be another process's by now:
# so a single pid, that of a sandbox's first process, is killed only if it is still bubblewrap, which that process
# remains for as long as it lives.
_EXECUTOR = """exec 3<&0
(
trap '' HUP INT QUIT TERM
named=' '
while read -r how what; do
    case $how in
    name) named="$named$what " ;;
    strike) named="${named%% $what *} ${named#* $what }" ;;
    esac
done
for one in $named; do
    case $one in
    -*) kill -s KILL -- "$one" ;;
    *) read -r program < "/proc/$one/comm" && [ "$program" = bwrap ] && kill -s KILL -- "$one" ;;
    esac
done
) <&3 3<&- &"""

log = logging.getLogger(__name__)


class OrphanReaper:
    """The pids to kill, and a shell that has them. It is started with the first pid, and again if it is gone."""

    def __init__(self) -> None:
        self._named: set[int] = set()
        self._line: int | None = None
        self._lock = threading.Lock()

    def register(self, pid: int) -> None:
        """Have a process killed if the server dies, or, by a negative number, a process group."""
        with self._lock:
            if pid not in self._named:
                self._named.add(pid)
                self._say(f"name {pid}\n")

    def unregister(self, pid: int) -> None:
        """Forget a process or group that has ended; may be called twice."""
        with self._lock:
            if pid in self._named:
                self._named.discard(pid)
                self._say(f"strike {pid}\n")

    def _say(self, words: str) -> None:
        if self._line is not None:
            try:
                os.write(self._line, words.encode())
            except (BrokenPipeError, BlockingIOError):  # the shell was killed, or stopped
                os.close(self._line)
                self._line = None
            else:
                return
        self._start()

    def _start(self) -> None:
        """Start a shell that gets all pids so far."""
        reading, line = os.pipe()
        try:
            # In a session of its own, so that signals from the server's terminal do not reach it.
            subprocess.run(
                ["/bin/sh", "-c", _EXECUTOR],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
                check=True,
            )
            os.set_blocking(line, False)
            os.write(line, "".join(f"name {pid}\n" for pid in self._named).encode())
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("what is being started would outlive this server, were it killed: %s", error)
            os.close(line)
        else:
            self._line = line
        finally:
            os.close(reading)


OF_THIS_SERVER = OrphanReaper()
"""One for this process, whichever provider makes the sandboxes."""
