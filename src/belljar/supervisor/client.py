"""The server's connection to its supervisor: finds or starts it, sends requests, and copes when it is gone.

Requests that need no answer are sent without waiting, so their effect is there for the next server whatever happens to
this one. Answers are awaited for `ANSWER_S` at most. It blocks only while a server starts, when nobody else waits.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from belljar.distribution import own_version
from belljar.errors import SandboxUnavailable
from belljar.file_lock import hold_lock
from belljar.inside.supervisor.packets import FORM, LOG, PACKET_BYTES, TAKEN, WELCOME, Unreceived, receive
from belljar.supervisor import discovery
from belljar.supervisor.deposit_format import maker_of, read, unreadable, written

# The connection. Requests go out at once and answers come in the same order. A supervisor that is stopped, or busy for
# long, delays only those who wait for its answer, and them no longer than they choose. It does not know the requests.

GONE = "the supervisor is gone"
MAX_UNANSWERED = 1_000
Answer = tuple[dict[str, Any], list[int]]
"""The answer's JSON, and descriptors that the reader owns."""


class SupervisedChild:
    """A child of the supervisor, until it is released or detached."""

    def __init__(self, parent: "SupervisorClient", pid: int, pidfd: int) -> None:
        self.pid = pid
        self._parent = parent
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._status = 0
        self._has_ended = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._loop.add_reader(pidfd, self._on_exit)

    async def wait(self) -> int:
        """Return the exit status when it ends; negative for a signal."""
        await self._has_ended.wait()
        return self._status

    def kill_group(self) -> None:
        """Send SIGKILL to the child and its process group."""
        if self._pidfd >= 0:
            # Also from here, because the supervisor may take a while.
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._parent.kill_group_of(self.pid)

    def release(self) -> None:
        """Have the supervisor reap the child, once it has ended; may be called twice."""
        if self._pidfd >= 0:
            self.detach()
            self._parent.forget_child(self.pid)

    def detach(self) -> None:
        """Stop watching the child and let it live; may be called twice."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        self._status = await self._parent.status_of(self.pid)
        self._has_ended.set()


class SupervisorConnection:
    """One connection to the supervisor, read by a thread of its own."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._unanswered: deque[tuple[float, Future[Answer]]] = deque()
        self._is_over = False
        sock.settimeout(None)
        self._reader = threading.Thread(target=self._read, name="supervisor", daemon=True)
        self._reader.start()

    @property
    def is_over(self) -> bool:
        """Whether the supervisor has hung up."""
        return self._is_over

    @property
    def silent_s(self) -> float:
        """How long the oldest request has waited for its answer; 0 when all are answered."""
        with self._lock:
            return time.monotonic() - self._unanswered[0][0] if self._unanswered else 0.0

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> "Future[Answer]":
        """Send a request without waiting. Its descriptors may be closed then; an answer's belong to its taker."""
        future: Future[Answer] = Future()
        packet = json.dumps(request).encode()
        refusal = ""
        if len(packet) > PACKET_BYTES:
            refusal = f"{request['op']}: {len(packet):,} bytes, and {PACKET_BYTES:,} is the most"
        else:
            with self._lock:
                refusal = self._sent(packet, descriptors)
                if not refusal:
                    self._unanswered.append((time.monotonic(), future))
        if refusal:
            future.set_result(({"error": refusal}, []))
        return future

    def _sent(self, packet: bytes, descriptors: Sequence[int]) -> str:
        """Send a packet; return why that failed, or nothing."""
        if self._is_over:
            return GONE
        if len(self._unanswered) >= MAX_UNANSWERED:
            return f"the supervisor has not answered {MAX_UNANSWERED:,} requests"
        try:
            socket.send_fds(self._sock, [packet], descriptors, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return "the supervisor takes no more requests"
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EMSGSIZE, errno.ETOOMANYREFS):  # not sent; the supervisor is there
                return str(error.strerror)
            # Set before the reading thread notices, because whoever asks again at once must find another supervisor.
            self._is_over = True
            return GONE
        return ""

    def wait(self, limit_s: float) -> None:
        """Wait until the supervisor hangs up, or for `limit_s`."""
        self._reader.join(limit_s)

    def close(self) -> None:
        """Hang up; may be called twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _read(self) -> None:
        while True:
            try:
                packet, descriptors = receive(self._sock)
            except Unreceived as error:
                # An answer came, but this server has no room for its descriptors; its JSON still says what was done.
                answer = _read_answer(error.packet) if error.errno == errno.EMFILE else {}
                self._answer(({**(answer or {}), "error": str(error.strerror)}, []))
                continue
            except OSError:
                break
            answer = _read_answer(packet)
            if answer is None:
                close_all(descriptors)
                break
            self._answer((answer, descriptors))
        with self._lock:
            self._is_over = True
            left, self._unanswered = self._unanswered, deque()
            self._sock.close()
        for _, future in left:
            future.set_result(({"error": GONE}, []))

    def _answer(self, answer: Answer) -> None:
        with self._lock:
            future = self._unanswered.popleft()[1] if self._unanswered else None
        if future is not None:
            future.set_result(answer)
        else:
            close_all(answer[1])


def _read_answer(packet: bytes) -> dict[str, Any] | None:
    """Return an answer's JSON; None at the end of the connection, and for anything our supervisor does not send."""
    try:
        answer: Any = json.loads(packet)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else None


def close_all(descriptors: Sequence[int]) -> None:
    """Close the descriptors of an answer that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)


ANSWER_S = 10.0
LOOK_S = 1.0
_TRIES = 3
_STOPPED = "the supervisor for keep_alive gives no answer"
_STOPPED_HINT = "It may be stopped: let it go on (kill -CONT), or end it, and its sessions with it"

OnLate = Callable[["Future[Answer]"], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deposit:
    """What the supervisor stores under one key for the next server."""

    fields: dict[str, Any]
    descriptors: list[int] = field(default_factory=list[int])
    children: list[int] = field(default_factory=list[int])
    """Children of the supervisor. Those in no deposit are killed when the server ends."""
    is_session: bool = False
    """Whether the supervisor waits for another server while it has this."""
    folders: list[str] = field(default_factory=list[str])
    """Control groups that the supervisor removes when it ends everything."""
    maker: str = ""
    """Which belljar deposited it, in words, once it is taken."""


class SupervisorClient:
    """A server's client of its supervisor; made by `open_supervisor`."""

    def __init__(self, folder: Path, patience_s: float) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._exchange: SupervisorConnection | None = None
        self._kept: set[str] = set()
        self.found: list[str] = []
        """The keys that an earlier server left."""
        self.refusal = ""
        """Why nothing of what an earlier server left can be had, where that is so."""
        self._pid = 0
        self._on_start: Callable[[int], None] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether a supervisor is connected."""
        return self._exchange is not None and not self._exchange.is_over

    def when_started(self, on_start: Callable[[int], None]) -> None:
        """Call back with the pid of the supervisor that is connected, and of each that takes its place.

        It is called before the supervisor is used, and may block, where `connect_or_start` is called.
        """
        self._on_start = on_start
        if self.is_connected:
            on_start(self._pid)

    def connect_or_start(self) -> bool:
        """Connect to the supervisor or start one; False when another server has it. Blocks."""
        # Servers that start together look for a supervisor one after the other.
        with hold_lock(self._folder / "lock"):
            if self.is_connected:  # another thread has just done it
                return True
            for _ in range(_TRIES):
                # A supervisor that is about to end may still be found, and hangs up; then another one is started.
                sock = discovery.connect(self._folder) or discovery.start(self._folder)
                if sock is None:
                    continue
                try:
                    first = discovery.greeting(sock)
                except TimeoutError:
                    sock.close()
                    raise SandboxUnavailable(_STOPPED, hint=_STOPPED_HINT) from None
                if first != WELCOME:
                    sock.close()
                if first == TAKEN:
                    return False
                if first == WELCOME and self._introduce(SupervisorConnection(sock)):
                    return True
        raise SandboxUnavailable(
            "the supervisor for keep_alive does not answer", hint=f"Look into {self._folder / LOG}"
        )

    def _introduce(self, connection: SupervisorConnection) -> bool:
        answer, _ = self._wait_in_thread(connection.ask(self._introduction()))
        if "error" in answer:
            connection.close()
            return False
        if answer.get("form") != FORM:
            # A supervisor of another version has another protocol, so its deposits cannot be taken over.
            self.refusal = unreadable(maker_of(answer)).message
            log.warning("the supervisor's sessions cannot be taken over and end: %s", self.refusal)
            os.kill(answer["pid"], signal.SIGTERM)
            connection.wait(ANSWER_S)
            connection.close()
            return False
        self._exchange, self.found = connection, answer["keys"]
        self._kept = set(self.found)
        self._pid = answer["pid"]
        if self._on_start is not None:
            self._on_start(self._pid)
        return True

    def _introduction(self) -> dict[str, Any]:
        return {"op": "attend", "patience_s": self._patience_s, "version": own_version()}

    async def ensure_running(self) -> None:
        """Start another supervisor if it is gone."""
        if not self.is_connected and not await asyncio.to_thread(self.connect_or_start):
            raise SandboxUnavailable("the supervisor for keep_alive is another server's by now")

    async def fault(self) -> str:
        """Return why it could start nothing now; empty when it answers, or is gone and will be replaced."""
        if not self.is_connected:
            return ""
        answer, _ = await self._wait_for_answer(self._ask(self._introduction()), LOOK_S)
        return str(answer.get("error", "")) if self.is_connected else ""

    # Children

    async def start_child(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
    ) -> SupervisedChild:
        """Start a command as a child of the supervisor, in a session and process group of its own."""
        request = {
            "op": "start",
            "command": [*command],
            "environment": dict(environment),
            "folder": folder,
            "targets": [0, 1, 2, *pass_fds],
        }
        answer, descriptors = await self._start(request, (stdin, stdout, stderr), pass_fds)
        if answer.get("error") == GONE:  # nobody had noticed that until now
            answer, descriptors = await self._start(request, (stdin, stdout, stderr), pass_fds)
        if "error" in answer:
            if "pid" in answer:  # it runs, but this server had no room for its descriptor
                self._end_unwanted(answer["pid"])
            hint = _STOPPED_HINT if answer["error"] == _STOPPED else ""
            raise SandboxUnavailable(f"Cannot start {command[0]}: {answer['error']}", hint=hint)
        return SupervisedChild(self, answer["pid"], descriptors[0])

    async def _start(self, request: dict[str, Any], streams: Sequence[int], pass_fds: Sequence[int]) -> Answer:
        await self.ensure_running()
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            given = [nothing if one == subprocess.DEVNULL else one for one in streams]
            asked = self._ask(request, [*given, *pass_fds])
        finally:
            os.close(nothing)
        return await self._wait_for_answer(asked, on_late=self._end_late)

    def _end_late(self, asked: "Future[Answer]") -> None:
        """Kill a child that was started after all, when nobody waited for it any more."""
        answer, descriptors = asked.result()
        close_all(descriptors)
        if "pid" in answer:
            self._end_unwanted(answer["pid"])

    def _end_unwanted(self, pid: int) -> None:
        self.kill_group_of(pid)
        self.forget_child(pid)

    def find_child(self, pid: int) -> SupervisedChild:
        """Return a child that an earlier server started. Blocks."""
        answer, descriptors = self._wait_in_thread(self._ask({"op": "find", "pid": pid}))
        if "error" in answer:
            raise SandboxUnavailable(f"A kept process is gone: {answer['error']}")
        return SupervisedChild(self, pid, descriptors[0])

    async def status_of(self, pid: int) -> int:
        """Return a child's exit status; that of a SIGKILL when the supervisor is gone, because its children end too."""
        answer, _ = await self._wait_for_answer(self._ask({"op": "ask", "pid": pid}))
        status = answer.get("status")
        return -signal.SIGKILL if status is None else status

    def kill_group_of(self, pid: int) -> None:
        """Kill a child and its process group."""
        self._ask({"op": "kill", "pid": pid})

    def forget_child(self, pid: int) -> None:
        """Tell the supervisor that nobody will ask about this child."""
        self._ask({"op": "forget", "pid": pid})

    # Deposits

    def store(self, key: str, deposit: Deposit) -> None:
        """Store something, in place of what was under this key. The descriptors are sent when this returns."""
        request = {
            "op": "keep",
            "key": key,
            "words": written(deposit.fields),  # the key that supervisors started by earlier versions know
            "children": deposit.children,
            "is_session": deposit.is_session,
            "folders": deposit.folders,
        }
        is_new = key not in self._kept
        self._kept.add(key)

        def note(asked: "Future[Answer]") -> None:
            answer, _ = asked.result()
            if "error" in answer:
                log.warning("%s is not kept: %s", key, answer["error"])
                if is_new:  # otherwise the earlier deposit is still under the key
                    self._kept.discard(key)

        self._ask(request, deposit.descriptors).add_done_callback(note)

    def take(self, key: str) -> Deposit:
        """Return what is stored under a key, with descriptors that the caller owns. Blocks.

        Raise SandboxUnavailable when there is nothing, or this version cannot read it.
        """
        answer, descriptors = self._wait_in_thread(self._ask({"op": "take", "key": key}))
        if "error" in answer or answer.get("words") is None:
            raise SandboxUnavailable(f"{key} is not kept{': ' if 'error' in answer else ''}{answer.get('error', '')}")
        try:
            return Deposit(read(answer["words"]), descriptors, maker=maker_of(answer["words"]))
        except SandboxUnavailable:
            close_all(descriptors)
            raise

    def has(self, key: str) -> bool:
        """Return whether something is stored under a key, as far as is known; see `wait_until_settled`."""
        return self.is_connected and key in self._kept

    def has_any(self, prefix: str) -> bool:
        """Return whether something is stored under a key with this prefix."""
        return self.is_connected and any(key.startswith(prefix) for key in [*self._kept])

    def drop(self, key: str, *, ends: bool = False) -> None:
        """Remove a deposit; with `ends` its children are killed too. May be called twice."""
        if key in self._kept:
            self._kept.discard(key)
            self._ask({"op": "drop", "key": key, "ends": ends})

    async def wait_until_settled(self) -> None:
        """Wait until all requests so far are answered, or the supervisor is gone or silent for too long."""
        await self._wait_for_answer(self._ask(self._introduction()))

    def close(self) -> None:
        """Hang up. The supervisor then waits with its deposits; without any it ends. May be called twice."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    # Questions

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> "Future[Answer]":
        if self._exchange is not None and not self._exchange.is_over:
            return self._exchange.ask(request, descriptors)
        gone: Future[Answer] = Future()
        gone.set_result(({"error": GONE}, []))
        return gone

    def _wait_in_thread(self, asked: "Future[Answer]") -> Answer:
        try:
            return asked.result(self._left_s())
        except TimeoutError:
            asked.add_done_callback(_discard)
            return {"error": _STOPPED}, []

    async def _wait_for_answer(
        self, asked: "Future[Answer]", limit_s: float = ANSWER_S, on_late: OnLate | None = None
    ) -> Answer:
        """Return the answer, or an error when none comes; an answer that comes too late goes to `on_late`."""
        try:
            async with asyncio.timeout(min(limit_s, self._left_s())):
                return await asyncio.shield(asyncio.wrap_future(asked))
        except TimeoutError:
            asked.add_done_callback(on_late or _discard)
            return {"error": _STOPPED}, []
        except asyncio.CancelledError:
            asked.add_done_callback(on_late or _discard)
            raise

    def _left_s(self) -> float:
        """Return how long to wait for an answer: a supervisor that is already silent gets only what is left."""
        silent_s = self._exchange.silent_s if self._exchange is not None else 0.0
        return max(LOOK_S, ANSWER_S - silent_s)


def _discard(asked: "Future[Answer]") -> None:
    close_all(asked.result()[1])


class NoSupervisor:
    """Stands in for a supervisor where everything ends with the server: it keeps nothing."""

    async def ensure_running(self) -> None:
        """Return at once, because there is nothing to wait for."""

    def has(self, key: str) -> bool:
        """Return False, because nothing is stored."""
        return False

    def store(self, key: str, deposit: Deposit) -> None:
        """Do nothing; the descriptors stay the caller's."""

    def drop(self, key: str) -> None:
        """Do nothing."""


@contextmanager
def open_supervisor(data_directory: Path, patience_s: float) -> Generator[SupervisorClient | None]:
    """Open the client of a data directory's supervisor; None when another server has it."""
    supervisor = SupervisorClient(discovery.own_folder(data_directory), patience_s)
    try:
        yield supervisor if supervisor.connect_or_start() else None
    finally:
        supervisor.close()
