"""A connection to a supervisor: requests go out at once, answers come in their order, whoever waits for them.

A supervisor that is stopped, or busy for long, holds up nobody but those who wait for its answer, and them no longer
than they like. Knows nothing of what is asked.
"""

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

from belljar.supervisor.apart.packets import PACKET_BYTES, Unreceived, receive

GONE = "the supervisor is gone"
MOST_UNANSWERED = 1_000
Answer = tuple[dict[str, Any], list[int]]
"""Words, and descriptors that are the reader's own."""


class Exchange:
    """One connection, read by a thread of its own."""

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
        """Whether nobody is at the other end."""
        return self._is_over

    @property
    def silent_s(self) -> float:
        """For how long the oldest request has waited for its answer; 0 when all are answered."""
        with self._lock:
            return time.monotonic() - self._unanswered[0][0] if self._unanswered else 0.0

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> "Future[Answer]":
        """Send a request and wait for nothing. What it carries may be closed then; an answer's is its taker's."""
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
        """Why a packet could not be sent."""
        if self._is_over:
            return GONE
        if len(self._unanswered) >= MOST_UNANSWERED:
            return f"the supervisor has not answered {MOST_UNANSWERED:,} requests"
        try:
            socket.send_fds(self._sock, [packet], descriptors, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return "the supervisor takes no more requests"
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EMSGSIZE, errno.ETOOMANYREFS):  # nothing was sent, and it is there
                return str(error.strerror)
            # Before the reader notices, because whoever asks again at once must find another supervisor.
            self._is_over = True
            return GONE
        return ""

    def wait(self, limit_s: float) -> None:
        """Until the other end hangs up, or that long."""
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
                # An answer came, and this server has no room for it; what was done for it is in its words.
                words = _read_answer(error.packet) if error.errno == errno.EMFILE else {}
                self._answer(({**(words or {}), "error": str(error.strerror)}, []))
                continue
            except OSError:
                break
            words = _read_answer(packet)
            if words is None:
                close_all(descriptors)
                break
            self._answer((words, descriptors))
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
    """Return an answer; None for the end of the connection, and for what no supervisor of ours says."""
    try:
        words: Any = json.loads(packet)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", words) if isinstance(words, dict) else None


def close_all(descriptors: Sequence[int]) -> None:
    """Those of an answer that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)
