"""The server's side of a sandbox maker: the process in a forkable sandbox that makes those nested in it.

The process itself is `inside/sandbox_maker/`. It is used where bubblewrap could be, for sandboxes that are only held
open until a fork enters them, and bubblewrap is used where it cannot be. It sees no session's code: that is one pid
namespace below. It ends with the server, and everything that it made ends with it.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from belljar.inside import FOLDER, package_command
from belljar.inside.supervisor.packets import MAX_DESCRIPTORS, PACKET_BYTES, Unreceived, receive, widen
from belljar.sandboxes.child import Child, start_child, wait_readable
from belljar.sandboxes.namespace.bwrap_args import encode

log = logging.getLogger(__name__)

OnAnswer = Callable[[int, str], None]
"""Called with a pidfd, which the callee closes, or with -1 and the reason why there is none."""

PROCESS = FOLDER / "sandbox_maker"
MAKING_S = 30.0
_AT_ONCE = 4
"""How many requests wait in the maker's socket: each has some 40 descriptors, and Linux bounds those on the way."""


class MakingRequest(NamedTuple):
    """A sandbox to make. Numbers in it are the server's descriptors."""

    arguments: Sequence[str]
    """bubblewrap's arguments for the root folder."""
    descriptors: Sequence[int]
    """All descriptors that the arguments and the groups name."""
    groups: Sequence[int]
    """The files by which the first process joins its control groups."""
    maps: str
    """The uid and gid map, one text for both."""
    hostname: str
    """Empty where sandboxes have none of their own."""
    counts: Mapping[str, int]
    """The most of what Linux counts in user namespaces, by the names of files in /proc/sys/user."""


class SandboxMaker:
    """A process that makes sandboxes nested in one, in the order in which they are asked for."""

    def __init__(self, seccomp: int, namespaces: Sequence[int]) -> None:
        self.refusal = ""
        """Why the maker makes no sandboxes on this host; empty as long as it may."""
        self._has_made = False
        self._waiting: deque[OnAnswer] = deque()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            widen(ours)
            ours.setblocking(False)
            given = [theirs.fileno(), seccomp, *namespaces]
            program = package_command(os.path.realpath(sys.executable), PROCESS, "maker")
            nowhere = subprocess.DEVNULL
            try:
                self._child = start_child(
                    [*program, *map(str, given)],
                    environment={},
                    folder="/",
                    stdin=nowhere,
                    stdout=nowhere,
                    stderr=nowhere,
                    pass_fds=given,
                )
            except BaseException:
                ours.close()
                raise
        self._sock = ours
        self._loop.add_reader(ours, self._on_packet)
        # As for `UserMapHelper`: a sandbox whose loop ends before it is not closed.
        self._end = weakref.finalize(self, _end, self._child, ours)
        self._end.atexit = False

    @property
    def pid(self) -> int:
        """The pid of the maker's parent, a child of the server, which is outside the sandbox."""
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether the maker has ended, and can make no more sandboxes."""
        return not self._end.alive

    async def wait_until_inside(self) -> None:
        """Wait until the maker has entered the sandbox; the descriptors of its namespaces may be closed then."""
        inside: asyncio.Future[str] = self._loop.create_future()
        self._waiting.append(lambda _, refusal: None if inside.done() else inside.set_result(refusal))
        if refusal := await inside:
            self.note(refusal)

    async def make(self, prepare: Callable[[contextlib.ExitStack], MakingRequest], adopt: Callable[[int], None]) -> str:
        """Have a sandbox made; return why it was not, or nothing.

        `prepare` opens the descriptors when it is this sandbox's turn; they are closed as soon as they are sent.
        `adopt` gets a pidfd of the first process as soon as there is one, even if this call is cancelled meanwhile.
        """
        async with self._turns:
            status, status_end = os.pipe()
            try:
                with contextlib.ExitStack() as stack:
                    stack.callback(os.close, status_end)
                    answer = self._ask(prepare(stack), status_end, adopt)
                async with asyncio.timeout(MAKING_S):
                    complaint = await answer
                    if not complaint:
                        # The pipe closes when the first process executes `sleep`, which is the last step.
                        await wait_readable(status)
                        complaint = os.read(status, 4096).decode(errors="replace")
            except TimeoutError:
                self.refusal = f"no answer in {MAKING_S:g} s"
                return self.refusal
            finally:
                os.close(status)
        return complaint

    def _ask(self, request: MakingRequest, status: int, adopt: Callable[[int], None]) -> asyncio.Future[str]:
        answer: asyncio.Future[str] = self._loop.create_future()

        def on_answer(pidfd: int, refusal: str) -> None:
            if pidfd >= 0:
                adopt(pidfd)
            if not answer.done():
                answer.set_result(refusal)

        descriptors = [*request.descriptors, status]
        head = {
            "hostname": request.hostname,
            "counts": dict(request.counts),
            "maps": request.maps,
            "groups": request.groups,
            "status": status,
            "descriptors": descriptors,
        }
        packet = json.dumps(head).encode() + b"\0" + encode(request.arguments)
        if len(packet) > PACKET_BYTES or len(descriptors) > MAX_DESCRIPTORS:
            on_answer(-1, f"{len(packet):,} bytes and {len(descriptors)} descriptors are too many for one request")
            return answer
        try:
            socket.send_fds(self._sock, [packet], descriptors)
        except OSError as error:
            on_answer(-1, str(error.strerror))
        else:
            self._waiting.append(on_answer)
        return answer

    def note(self, complaint: str) -> None:
        """Note that a sandbox was made, or why not. A maker whose first sandbox fails is asked for no more."""
        if not complaint:
            self._has_made = True
            return
        if not self._has_made:
            self.refusal = complaint
        log.info("bubblewrap makes the sandbox of a fork, which takes longer: %s", complaint)

    def _on_packet(self) -> None:
        try:
            packet, descriptors = receive(self._sock)
        except BlockingIOError:
            return
        except Unreceived as error:
            packet, descriptors = json.dumps({"error": error.strerror}).encode(), []
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self.close()
            return
        on_answer = self._waiting.popleft()
        on_answer(descriptors[0] if descriptors else -1, json.loads(packet).get("error", ""))

    def close(self) -> None:
        """End the maker, and with it every sandbox that it has made; may be called twice."""
        if self._end.alive:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._sock)
            self._end()
        while self._waiting:
            self._waiting.popleft()(-1, "the process that makes sandboxes has ended")


def _end(child: Child, sock: socket.socket) -> None:
    sock.close()
    child.kill_group()
    child.release()


class MadeChild:
    """The first process of a sandbox as a `Started` process, though it is the maker's child and not the server's."""

    def __init__(self, maker_pid: int) -> None:
        self.pid = maker_pid

    async def wait(self) -> int:
        """Return -SIGKILL at once, because Linux tells the real status to the parent alone, the maker."""
        return -signal.SIGKILL

    def kill_group(self) -> None:
        """Do nothing, because the process is killed by its pidfd."""

    def release(self) -> None:
        """Do nothing, because Linux reaps the process: the maker ignores SIGCHLD."""

    def detach(self) -> None:
        """Do nothing, because the process ends with the server."""


def pid_of(pidfd: int) -> int:
    """Return the pid, on the host, of the process behind a pidfd; 0 when it is gone."""
    information = os.open(f"/proc/self/fdinfo/{pidfd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = re.search(rb"^Pid:\s*(\d+)", os.read(information, 4096), re.MULTILINE)
    finally:
        os.close(information)
    return int(found[1]) if found else 0
