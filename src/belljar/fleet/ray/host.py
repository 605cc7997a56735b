"""The host of a node: `belljar serve` in processes of its own, which go on when all of Ray is gone.

A small process, the keeper, runs the server, starts it again when it dies, and notes when it has ended in good order,
which somebody wanted. Keeper and server hold a lock while they live, and whoever finds it held adopts them. A process
id would mislead: in a container nobody may reap what has died, and what nobody has reaped looks alive.

Knows nothing of Ray, and imports little, because the keeper stays as long as the server does.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from belljar.files.private import make_folder, replace_file
from belljar.servers import is_living

RESTART_S: Final = 0.2
MOST_RESTART_S: Final = 30.0
STEADY_S: Final = 60.0
"""A server that ran for this long is started again as quickly as the first time."""
_LOG_BYTES: Final = 16 * 1024 * 1024
_TAIL_BYTES: Final = 4_000


class NodeHost:
    """The server of this machine, as its folder tells of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers = folder / "peers"
        """The file with the addresses of all machines, which the server reads again when it changes."""
        self.log = folder / "host.log"
        self._lock = folder / "lock"
        self._recipe = folder / "start.json"
        self._ended = folder / "ended"
        self._failed = folder / "failed"

    def prepare(self, command: Sequence[str], variables: Mapping[str, str], told: Mapping[str, Any]) -> None:
        """Write down how the server is started, and what the agent tells of it; the file may hold secrets."""
        make_folder(self.folder)
        recipe = {"command": [*command], "variables": {**variables}, "directory": str(Path.cwd()), "told": {**told}}
        replace_file(self._recipe, json.dumps(recipe))
        self._ended.unlink(missing_ok=True)
        if not self.peers.exists():
            replace_file(self.peers, "")

    @property
    def told(self) -> dict[str, Any]:
        """What was written down to be told of the server."""
        return self._read_recipe()["told"]

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended in good order, and is to stay so."""
        return self._ended.exists()

    def is_running(self) -> bool:
        """Return whether the keeper or the server lives."""
        descriptor = self._try_lock()
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def is_ready(self) -> bool:
        """Return whether the server of this machine accepts connections."""
        runs = Path(self.told["data_directory"]) / "runs"
        return self.is_running() and any(is_living(runs, path.parent.name) for path in runs.glob("*/address"))

    def start(self) -> bool:
        """Start the server, and forget that it has ended; return False where it runs already, and is adopted."""
        descriptor = self._try_lock()
        if descriptor is None:
            return False
        try:
            for mark in (self._ended, self._failed):
                mark.unlink(missing_ok=True)
            # It forks and we wait for its parent, so that it is no child of ours: Ray ends the children of its workers.
            subprocess.run(
                [sys.executable, "-P", "-m", __name__, str(self.folder), str(descriptor)],
                env=self._read_recipe()["variables"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
                check=True,
            )
        finally:
            os.close(descriptor)
        return True

    def stop(self) -> None:
        """Have the server end in good order, without waiting for it."""
        for pid in self._holders():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def read_peers(self) -> list[str]:
        """Return the lines of the list."""
        try:
            return self.peers.read_text().splitlines()
        except FileNotFoundError:
            return []

    def write_peers(self, lines: Sequence[str]) -> None:
        """Replace the list, unless it says so already."""
        if self.read_peers() != [*lines]:
            replace_file(self.peers, "".join(f"{line}\n" for line in lines))

    def has_failed(self) -> bool:
        """Return whether the server has died since it was started for the first time, or again after its end."""
        return self._failed.exists()

    def log_tail(self) -> str:
        """Return the last lines of what the server has logged."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def keep(self, descriptor: int) -> None:
        """Run the server until it ends in good order; called in the keeper, which holds the lock by `descriptor`."""
        stopping = threading.Event()
        running: list[subprocess.Popen[bytes]] = []

        def stop(*_: object) -> None:
            stopping.set()
            for process in running:
                process.terminate()

        signal.signal(signal.SIGTERM, stop)
        delay_s = RESTART_S
        while not stopping.is_set():
            began = time.monotonic()
            recipe = self._read_recipe()
            running[:] = [
                subprocess.Popen(
                    recipe["command"],
                    env=recipe["variables"],
                    cwd=recipe["directory"],
                    pass_fds=[descriptor],
                    start_new_session=True,
                )
            ]
            if stopping.is_set():
                running[0].terminate()
            status = running[0].wait()
            if status == 0:
                break
            delay_s = RESTART_S if time.monotonic() - began > STEADY_S else delay_s
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            _say(f"the server (pid {running[0].pid}) {how}: it starts again in {delay_s:.1f} s")
            self._failed.touch()
            running.clear()
            stopping.wait(delay_s)
            delay_s = min(MOST_RESTART_S, 2 * delay_s)
        self._ended.touch()

    def _try_lock(self) -> int | None:
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def _holders(self) -> list[int]:
        """Return the processes that have the lock's file open, which no other process of this number can have."""
        if not self._lock.exists():
            return []
        lock = self._lock.stat()
        found: set[int] = set()
        for path in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                status = path.stat()
                if (status.st_ino, status.st_dev) == (lock.st_ino, lock.st_dev):
                    found.add(int(path.parent.parent.name))
        return sorted(found - {os.getpid()})

    def _read_recipe(self) -> dict[str, Any]:
        return json.loads(self._recipe.read_bytes())


def _say(text: str) -> None:
    print(f"belljar fleet: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Be the keeper: leave whoever has started this, then run the server."""
    host, descriptor = NodeHost(Path(sys.argv[1])), int(sys.argv[2])
    if os.fork():
        os._exit(0)
    os.setsid()
    with suppress(FileNotFoundError):
        if host.log.stat().st_size > _LOG_BYTES:
            host.log.replace(host.log.with_suffix(".log.1"))
    log = os.open(host.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    host.keep(descriptor)


if __name__ == "__main__":
    main()
