"""The runner's main loop: attach to a host and do what it asks, one request at a time, until it is gone.

Owns the protocol's requests (`_on_*`), the order of outputs, `input()`, background tasks between cells, and what
happens in a process that was forked from the runner.
"""

# IPython is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import asyncio
import bdb
import builtins
import contextlib
import getpass
import importlib
import itertools
import json
import os
import random
import resource
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from IPython.core.error import StdinNotImplementedError

from . import comms, fork, gpu, interpreter_state, introspection, relocation, variables
from .channel import Channel
from .interrupts import Interrupts
from .pristine import no_traces
from .shell import ResultHook, Shell, build_shell, direct_outputs
from .state_file import StateContext
from .state_load import StateLoader
from .state_save import StateSaver
from .streams import Streams

NO_INPUT = "input() has nobody to ask here: the client cannot pass questions on. Put the value into the code instead."

NO_DEBUGGER = "the debugger has nobody to ask here: the client cannot pass questions on. Print what you want to know."
_SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"

MAX_VARIABLES = 200
LONGEST_NAME = 200


class Runner:
    """One IPython shell and, after `attach`, the connection to one host."""

    channel: Channel
    streams: Streams
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.shell: Shell = build_shell()
        self.interrupts = Interrupts()
        comms.install(self.emit)
        self._execution: Any = None
        self._allow_input = False
        self._awaits_go = False
        self.is_snapshot = False
        self._held: dict[str, Any] | None = None
        self._finished: dict[str, Any] | None = None
        self._waiting: deque[dict[str, Any]] = deque()

    def open_streams(self) -> None:
        """Put our streams into `sys`. A zygote does it for its copies, which then have other pipes at 1 and 2."""
        # Flush, because every copy would print again what modules have printed into the old streams' buffers.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.streams = Streams(self._synchronise, self._is_held)

    def attach(self, sock: socket.socket) -> None:
        """Connect to the host. Everything that must not exist before a fork is made here."""
        self.channel = Channel(sock)
        if not hasattr(self, "streams"):
            self.open_streams()
        self.interrupts.install()
        self.loop = asyncio.new_event_loop()
        self.shell.loop_runner = self._run_coroutine
        direct_outputs(self.shell, self.emit)
        self.shell.on_begin = self._begin
        self.shell.ask_form = self._ask_form
        self._wakeup: asyncio.Future[None] | None = None
        self.shell.is_forked = lambda: self.channel.is_forked()
        os.register_at_fork(after_in_child=self._close_in_child)
        os.environ.setdefault("SHELL", _SHELL)
        builtins.input = self._input
        getpass.getpass = self._getpass
        interpreter_state.remember_start(self.shell)
        self.channel.send({"type": "ready", "python": sys.version.split()[0]})

    def serve(self) -> None:
        """Serve requests until the host closes the socket."""
        while True:
            # A child that a cell, a callback or a task forked returns to this loop too when its work is done.
            if self.channel.is_forked():
                self._end_child(0)
            try:
                message = self._next()
            except EOFError:
                if self.is_snapshot:
                    os._exit(0)  # without flushing or exit functions, because these belong to the origin
                return
            handler = getattr(self, "_on_" + str(message.get("op")), None)
            if handler is not None:
                handler(message)

    # Children that the session forks

    def _close_in_child(self) -> None:
        """Close the socket in a forked child, because the host would take it for open after the runner's death."""
        if fork.is_copying():
            return
        self.channel.close()
        if (wakeup := self._wakeup) is None:
            return
        # A task forked this child between two cells. No request will come, so the child ends with that task. It needs
        # an event loop with a selector of its own, because the old selector is shared with the parent.
        relocation.own_loop(self.loop)
        task = asyncio.current_task(self.loop)
        if task is None:
            wakeup.set_result(None)
        else:
            task.add_done_callback(lambda _: wakeup.done() or wakeup.set_result(None))

    def _end_child(self, status: int) -> None:
        """Exit in a child that a cell forked, as a forked child of a script would; it does not serve the host."""
        with contextlib.suppress(Exception):
            self.streams.flush()
        os._exit(status)

    # Outputs and questions, which wait for the host's answer

    def emit(self, message: dict[str, Any]) -> None:
        """Send an output in order: the host reads the pipes empty before it handles the message, then acknowledges it.

        A result is nearly always the last output of a cell. It is held back until something follows it, so that it can
        be sent together with the end of the cell, which saves a round trip.
        """
        self.streams.flush()
        message = {**message, "id": self._execution}
        is_spare = self._execution is None and message["type"] == "comm"
        if is_spare or not self.channel.is_owner():
            # Between cells the host may not be reading, and a widget's message is not worth blocking its thread for.
            self.channel.send(message, if_room=is_spare)
            return
        self._send_held()
        if message["type"] == "result":
            self._held = message
        else:
            self._send_in_order(message)

    def _synchronise(self) -> bool:
        if not self.channel.is_owner() or self._execution is None:
            return False
        if not self._send_held():
            self._send_in_order({"type": "sync", "id": self._execution})
        return True

    def _is_held(self) -> bool:
        return self._held is not None

    def _send_held(self) -> bool:
        held, self._held = self._held, None
        if held is not None:
            self._send_in_order(held)
        return held is not None

    def _send_in_order(self, message: dict[str, Any]) -> None:
        with self.interrupts.held():
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
        self._send_held()
        with self.interrupts.held():
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

    def _on_attend(self, message: dict[str, Any]) -> None:
        """Answer a server that has taken over between two cells; it may have missed how the last cell ended."""
        self.channel.send({"type": "resumed", "id": message["id"], "last": self._finished})

    def _next(self) -> dict[str, Any]:
        if self._waiting:
            return self._waiting.popleft()
        if not self.channel.has_buffered() and self._has_background_tasks():
            self._run_background_tasks()
        return self.channel.receive()

    # Tasks that outlive their cell run while the runner waits for the next request

    def _has_background_tasks(self) -> bool:
        return not self.loop.is_closed() and bool(asyncio.all_tasks(self.loop))

    def _run_background_tasks(self) -> None:
        self._wakeup = wakeup = self.loop.create_future()
        descriptor = self.channel.fileno()
        self.loop.add_reader(descriptor, lambda: wakeup.done() or wakeup.set_result(None))
        try:
            self.loop.run_until_complete(wakeup)
            if self.channel.is_forked():
                self._end_child(0)
        finally:
            self._wakeup = None
            self.loop.remove_reader(descriptor)

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except KeyboardInterrupt:
            # Cancel and run to the end, so that the cell's `finally` blocks run and no task stays behind.
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
                self.loop.run_until_complete(task)
            raise

    # Copies: kernels and snapshots, see `fork`

    def _on_fork(self, message: dict[str, Any]) -> None:
        """Fork a copy of this session: a kernel, which has pipes of its own, or a snapshot, which has a socket only."""
        descriptors = self.channel.take_descriptors()
        own = {self.channel.fileno(), *descriptors, *relocation.loop_descriptors(self.loop)}
        answer: dict[str, Any] = {"type": "forked", "id": message["id"], "lost": fork.uncloneable(own)}
        if message.get("is_elsewhere"):
            answer["lost"] += fork.left_behind()
        if reason := fork.obstacle():
            answer["error"] = reason
        else:
            self.streams.flush()
            numbers, folder = random.getstate(), _folder()
            try:
                if len(descriptors) == 1:
                    is_copy = fork.fork_snapshot()
                else:
                    is_copy = fork.fork_kernel(
                        descriptors,
                        enter=partial(fork.await_sandbox, descriptors[0]) if message["is_elsewhere"] else None,
                        is_hidden=not self.is_snapshot,
                        has_keeper=message["has_keeper"],
                    )
            except OSError as error:
                is_copy, answer["error"] = False, fork.reason_of(error)
            if is_copy:
                random.setstate(numbers)
                self._become_copy(descriptors, message, folder)
                return
        for descriptor in descriptors:
            os.close(descriptor)
        self.channel.send(answer)
        if self.is_snapshot:
            fork.reap()

    def _become_copy(self, descriptors: list[int], message: dict[str, Any], folder: str) -> None:
        self.is_snapshot = len(descriptors) == 1
        self.streams.discard()
        if self.is_snapshot:
            fork.silence_streams()
            sock = socket.socket(fileno=descriptors[0])
        else:
            sock = fork.take_streams(descriptors)
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            fork.own_proc_entry()
        # Close it now, because the old socket object closes its descriptor when it is collected, and another file may
        # have that number by then.
        self.channel.close()
        self.channel = Channel(sock)
        # In a snapshot too, because the origin's pipes would never end and its ports never be free while it has them.
        fork.detach_inherited({self.channel.fileno()})
        if not self.is_snapshot:
            self._adopt_identity(message, folder)
        self._waiting.clear()
        self._finished = None  # the origin's
        self.channel.send({"type": "ready", "python": sys.version.split()[0]})

    def _adopt_identity(self, message: dict[str, Any], folder: str) -> None:
        """Give a copied kernel its own environment variables, package folders, working directory, loop and seeds."""
        os.environ.update(message["environment"])
        interpreter_state.move_start(message["environment"])
        for old, new in message["moved"].items():
            relocation.move_modules(old, new)
        # A process that has entered another sandbox has that sandbox's root as its working directory.
        for place in (folder, message["folder"]):
            with contextlib.suppress(OSError):
                os.chdir(place)
                break
        self.loop = relocation.own_loop(self.loop)
        fork.stir_random()
        if message["reseed"]:
            fork.reseed()

    # Requests: `op` names the handler

    def _on_execute(self, message: dict[str, Any]) -> None:
        self._run(message, lambda: self._run_cell(message["code"]))

    def _on_comm(self, message: dict[str, Any]) -> None:
        """Deliver a front end's message to a widget. Its callbacks run, and their outputs are sent, as in a cell."""
        self._run(message, lambda: self._deliver_comm(message))

    def _deliver_comm(self, message: dict[str, Any]) -> bool:
        self._begin()
        comms.deliver(message, self.emit)
        return True

    def _on_comms(self, message: dict[str, Any]) -> None:
        opened: dict[str, str] = {}
        with contextlib.suppress(Exception), self._interruptible():
            opened = comms.opened()
        self.channel.send({"type": "comms", "id": message["id"], "opened": opened})

    def _run(self, message: dict[str, Any], work: Callable[[], bool]) -> None:
        self._execution = message["id"]
        self._allow_input = bool(message.get("allow_input"))
        ResultHook.wants_value = bool(message.get("wants_value"))
        comms.reset_claims()
        self._awaits_go = bool(message.get("awaits_go"))
        self.streams.restore()
        if self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        count = self.shell.execution_count
        before = _cpu_s()
        is_ok = self._guarded(work)
        if self.channel.is_forked():
            self._end_child(0 if is_ok else 1)
        self._allow_input = False
        self._awaits_go = False  # still set after code that IPython could not parse
        self.streams.flush()
        held, self._held = self._held, None
        self._finished = {
            "type": "finished",
            "id": self._execution,
            "is_ok": is_ok,
            "execution_count": count,
            "cpu_s": _cpu_s() - before,
            "variables": self._variables(),
        }
        self.channel.send(*([held] if held else []), self._finished)
        self._execution = None

    def _run_cell(self, code: str) -> bool:
        outcome = self.shell.run_cell(code, store_history=True)
        error = outcome.error_in_exec
        if isinstance(error, SystemExit) and self.channel.is_forked():
            self._end_child(_exit_status(error))
        return bool(outcome.success) or (isinstance(error, SystemExit) and error.code in (None, 0))

    def _guarded(self, work: Callable[[], bool]) -> bool:
        try:
            with self.interrupts.cell():
                return work()
        except KeyboardInterrupt:
            self.emit({"type": "error", "name": "KeyboardInterrupt", "message": "", "traceback": ["KeyboardInterrupt"]})
        except BaseException as error:  # a hook or transformer of the session broke the shell itself
            lines = traceback.format_exc().splitlines()
            if self.channel.is_forked():
                print(*lines, sep="\n", file=sys.stderr)
            self.emit({"type": "error", "name": type(error).__name__, "message": str(error), "traceback": lines})
        return False

    def _begin(self) -> None:
        """Let the cell's own code begin, unless it was interrupted before.

        The signal of such an interrupt came too early to raise, so its message is looked for instead.
        """
        if self._awaits_go:
            self._await_go()
        if not self.interrupts.enable():
            return
        while self.channel.has_message():
            self._waiting.append(self.channel.receive())
        interrupt = {"op": "interrupt", "id": self._execution}
        if interrupt in self._waiting:
            self._waiting.remove(interrupt)
            raise KeyboardInterrupt

    def _await_go(self) -> None:
        """Wait for the host's `go`, because it has something to finish before the cell runs. Interrupts wait too."""
        self._awaits_go = False
        go = {"op": "go", "id": self._execution}
        while go not in self._waiting:
            self._waiting.append(self._receive())
        self._waiting.remove(go)

    def _variables(self) -> list[str]:
        # Filter the hidden names in C first, because IPython adds two of them with every cell.
        shown = itertools.filterfalse(self.shell.user_ns_hidden.__contains__, self.shell.user_ns)
        names = (name for name in shown if type(name) is str and not name.startswith("_") and len(name) <= LONGEST_NAME)
        try:
            return list(itertools.islice(names, MAX_VARIABLES))
        except Exception:
            # A key that is no text, and whose `__hash__` or `__eq__` raises.
            return list(itertools.islice(variables.shown_names(self.shell), MAX_VARIABLES))

    def _on_rehearse(self, message: dict[str, Any]) -> None:
        direct_outputs(self.shell, lambda _message: None)
        asyncio.set_event_loop(self.loop)
        with no_traces(self.shell):
            for cell in ("None", "0"):
                self.shell.run_cell(cell, store_history=False)
            failure = gpu.make_context() if message.get("makes_context") else ""
        direct_outputs(self.shell, self.emit)
        self.channel.send({"type": "rehearsed", "id": message["id"], "failure": failure})

    def _on_complete(self, message: dict[str, Any]) -> None:
        answer = introspection.no_completion(message["cursor"])
        with self._interruptible():
            answer = introspection.complete(self.shell, message["code"], message["cursor"])
        self.channel.send({**answer, "id": message["id"]})

    def _on_inspect(self, message: dict[str, Any]) -> None:
        answer = introspection.NOTHING_FOUND
        with self._interruptible():
            answer = introspection.inspect(self.shell, message["code"], message["cursor"], message["detail"])
        self.channel.send({**answer, "id": message["id"]})

    def _on_check(self, message: dict[str, Any]) -> None:
        self.channel.send({**introspection.check(self.shell, message["code"]), "id": message["id"]})

    def _on_variables(self, message: dict[str, Any]) -> None:
        answer = variables.answer_variables(self.shell, message)
        self.channel.send({**answer, "id": message["id"]})

    def _on_rows(self, message: dict[str, Any]) -> None:
        answer = variables.answer_rows(self.shell, message)
        self.channel.send({**answer, "id": message["id"]})

    @contextlib.contextmanager
    def _interruptible(self) -> Generator[None, None, None]:
        """Make the block interruptible, because looking at the session's names may run its code, and that may hang."""
        with contextlib.suppress(KeyboardInterrupt), self.interrupts.cell():
            self.interrupts.enable()
            yield
        self.streams.flush()

    def _on_import(self, message: dict[str, Any]) -> None:
        loaded = [name for name in message["watched"] if name in sys.modules]
        errors: dict[str, str] = {}
        importlib.invalidate_caches()
        with contextlib.suppress(KeyboardInterrupt), self.interrupts.cell():
            self.interrupts.enable()
            for name in message["modules"]:
                errors[name] = "interrupted"
                errors[name] = _import_error(name)
        self.streams.flush()
        failed = {name: error for name, error in errors.items() if error}
        self.channel.send({"type": "imported", "id": message["id"], "loaded": loaded, "errors": failed})

    def _on_save(self, message: dict[str, Any]) -> None:
        self._transfer_state(
            message, StateSaver(self.shell, message["path"], message["limit_bytes"], message["limit_s"])
        )

    def _on_load(self, message: dict[str, Any]) -> None:
        self._transfer_state(message, StateLoader(self.shell, message["path"]))

    def _transfer_state(self, message: dict[str, Any], work: StateContext) -> None:
        """Save or load state. That runs the session's code, so it is treated as a cell whose outputs are not shown."""
        self._execution = message["id"]
        self._allow_input = False
        self.streams.restore()
        with contextlib.suppress(KeyboardInterrupt), self.interrupts.cell():
            self._begin()
            work.run()
        work.finish()
        self.streams.flush()
        self._execution = self._held = None
        self.channel.send({**work.report.message(), "id": message["id"]})


def _is_debugger(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), bdb.Bdb)


def _exit_status(error: SystemExit) -> int:
    """Return the status that Python exits with after `sys.exit(…)`; print the argument if it is not a number."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""  # the folder has been removed


def _import_error(name: str) -> str:
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:2_000]
    return ""


def _cpu_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def main(descriptor: str) -> None:
    """Start without a zygote: build the shell, attach to the inherited socket, serve."""
    runner = Runner()
    runner.attach(socket.socket(fileno=int(descriptor)))
    runner.serve()
