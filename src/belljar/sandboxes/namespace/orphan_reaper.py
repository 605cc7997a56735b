"""What has to end should the server die without a word: named while it lives, carried out by a shell that outlives it.

Bubblewrap asks to be killed with its parent, but only some milliseconds after it was started, and what it has started
in turn asks for the same later still. A server that is killed in between would leave them to the host's init for good.
"""

import logging
import os
import subprocess
import threading

# It leaves its parent, who then has no child that it would have to know of. A number may be a stranger's by now: only
# the first process of a sandbox, which is bubblewrap for as long as it lives, is killed by its number alone.
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
    """Names, and a shell that has them. It is started with the first name, and once more should it be gone."""

    def __init__(self) -> None:
        self._named: set[int] = set()
        self._line: int | None = None
        self._lock = threading.Lock()

    def register(self, pid: int) -> None:
        """A process is to be killed, or a process group, as a negative number."""
        with self._lock:
            if pid not in self._named:
                self._named.add(pid)
                self._say(f"name {pid}\n")

    def unregister(self, pid: int) -> None:
        """It has ended; may be called twice."""
        with self._lock:
            if pid in self._named:
                self._named.discard(pid)
                self._say(f"strike {pid}\n")

    def _say(self, words: str) -> None:
        if self._line is not None:
            try:
                os.write(self._line, words.encode())
            except (BrokenPipeError, BlockingIOError):  # it was killed, or stopped
                os.close(self._line)
                self._line = None
            else:
                return
        self._start()

    def _start(self) -> None:
        """A shell that knows everything so far."""
        reading, line = os.pipe()
        try:
            # In a session of its own: what is typed or hung up at the server's terminal is not for it.
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
"""There is one death to prepare for, whoever makes the sandboxes."""
