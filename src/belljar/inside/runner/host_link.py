"""What the runner sends to the host while a cell runs: outputs in order, and questions. Both wait for an answer.

Owns the socket, the streams and the requests that come while an answer is waited for. Does not know what requests mean.
"""

import bdb
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from IPython.core.error import StdinNotImplementedError

from .channel import Channel
from .fork import set_handler
from .streams import Streams

NO_INPUT = "input() has nobody to ask here: the client cannot pass questions on. Put the value into the code instead."

NO_DEBUGGER = "the debugger has nobody to ask here: the client cannot pass questions on. Print what you want to know."


class HostLink:
    """The connection to one host, with the cell that its outputs and questions belong to."""

    channel: Channel
    streams: Streams

    def __init__(self) -> None:
        self.interrupts = Interrupts()
        self._execution: Any = None
        """The number of the request that runs; None between cells."""
        self._allow_input = False
        self._pending_result: dict[str, Any] | None = None
        """A result that is held back, see `emit`."""
        self._waiting: deque[dict[str, Any]] = deque()
        """Requests that came while an answer was waited for."""

    def emit(self, message: dict[str, Any]) -> None:
        """Send an output in order: the host reads the pipes empty before it handles the message, then acknowledges it.

        A result is nearly always the last output of a cell. It is held back until something follows it, so that it can
        be sent together with the end of the cell, which saves a round trip.
        """
        self.streams.flush()
        message = {**message, "id": self._execution}
        may_be_dropped = self._execution is None and message["type"] == "comm"
        if may_be_dropped or not self.channel.is_owner():
            # Between cells the host may not be reading, and a widget's message is not worth blocking its thread for.
            self.channel.send(message, if_room=may_be_dropped)
            return
        self._send_pending_result()
        if message["type"] == "result":
            self._pending_result = message
        else:
            self._send_in_order(message)

    def _synchronise(self) -> bool:
        if not self.channel.is_owner() or self._execution is None:
            return False
        if not self._send_pending_result():
            self._send_in_order({"type": "sync", "id": self._execution})
        return True

    def _has_pending_result(self) -> bool:
        return self._pending_result is not None

    def _send_pending_result(self) -> bool:
        result, self._pending_result = self._pending_result, None
        if result is not None:
            self._send_in_order(result)
        return result is not None

    def _send_in_order(self, message: dict[str, Any]) -> None:
        with self.interrupts.delayed():
            self.channel.send({**message, "ack": True})
            self._await("ack")

    def _input(self, prompt: object = "", /) -> str:
        __tracebackhide__ = True
        if not self._may_ask() and _is_debugger(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
            # Not EOFError, because a debugger would take the end of input for `quit`, and the cell would end silently.
            raise StdinNotImplementedError(NO_DEBUGGER)
        return self._answer_to({"prompt": str(prompt), "is_password": False})

    def _getpass(self, prompt: str = "Password: ", stream: Any = None) -> str:
        __tracebackhide__ = True
        return self._answer_to({"prompt": prompt, "is_password": True})

    def _ask_form(self, message: str, schema: dict[str, Any]) -> Any:
        """Put a form to the person, a flat JSON Schema, and return the values; None when they were declined.

        For the module `forms`. Raises EOFError where nobody can be asked.
        """
        question = {"prompt": message, "is_password": False, "form": schema}
        try:
            answer = self._answer_to(question)
        except EOFError:
            if not self._may_ask():
                raise
            return None
        return json.loads(answer)

    def _answer_to(self, question: dict[str, Any]) -> str:
        __tracebackhide__ = True
        if not self._may_ask():
            raise EOFError(NO_INPUT)
        self.streams.flush()
        self._send_pending_result()
        with self.interrupts.delayed():
            self.channel.send({"type": "input", "id": self._execution, **question})
            answer = self._await("input", **question)
        if answer.get("is_interrupt"):
            raise KeyboardInterrupt
        if answer.get("value") is None:
            raise EOFError("nobody answered input(): the question was declined")
        return str(answer["value"])

    def _may_ask(self) -> bool:
        return self._allow_input and self.channel.is_owner()

    def _await(self, op: str, **question: Any) -> dict[str, Any]:
        while True:
            message = self._receive()
            if message.get("op") == op:
                return message
            if message.get("op") == "attend":
                # Another server has taken over; the one that got the question cannot answer any more.
                self.channel.send({"type": "resumed", "id": message["id"], "awaits": op, **question})
                continue
            self._waiting.append(message)

    def _receive(self) -> dict[str, Any]:
        try:
            return self.channel.receive()
        except EOFError:
            os._exit(0)  # the host is gone, so nobody could see what the cell does next


def _is_debugger(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), bdb.Bdb)


# SIGINT: it raises in a running cell, is delayed while a message is half sent, and is ignored between cells


class Interrupts:
    """The process's one SIGINT handler."""

    def __init__(self) -> None:
        self._is_cell = False
        self._is_preparing = False
        self._delays = 0
        self._is_pending = False

    def install(self) -> None:
        """Install the handler, also over one that a cell has installed."""
        set_handler(signal.SIGINT, self._on_signal)

    def _on_signal(self, _number: int, _frame: "FrameType | None") -> None:
        __tracebackhide__ = True  # the cell's traceback ends where the cell was, not here
        if not self._is_cell:
            return
        if self._delays or self._is_preparing:
            self._is_pending = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def cell(self) -> Generator[None, None, None]:
        """Let interrupts raise in the block, from `enable` on.

        Not before, because IPython runs callbacks before the cell's code and swallows whatever is raised in them.
        """
        self.install()
        self._is_pending = False
        self._is_preparing = True
        try:
            self._is_cell = True
            yield
        finally:
            self._is_cell = self._is_preparing = False

    def enable(self) -> bool:
        """Let interrupts raise from now on, because the cell's own code begins; raise one that came before.

        Return False when it was called before for the same cell.
        """
        if not self._is_preparing:
            return False
        self._is_preparing = False
        self._raise_pending()
        return True

    @contextmanager
    def delayed(self) -> Generator[None, None, None]:
        """Delay interrupts until the block is over, so that no message is left half sent."""
        self._delays += 1
        try:
            yield
        finally:
            self._delays -= 1
        self._raise_pending()

    def _raise_pending(self) -> None:
        __tracebackhide__ = True
        if self._is_pending and not self._delays and not self._is_preparing and self._is_cell:
            self._is_pending = False
            raise KeyboardInterrupt
