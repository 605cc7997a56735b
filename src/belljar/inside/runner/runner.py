"""The runner's main loop: attach to a host and do what it asks, one request at a time, until it is gone.

Owns the protocol's requests (`_on_*`), background tasks between cells, and what happens in a process that was forked
from the runner.
"""

# IPython is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import asyncio
import builtins
import contextlib
import errno
import getpass
import importlib
import itertools
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any

from . import chart_libraries, comms, fork, fork_losses, gpu, interpreter_state, rich_output, setns, variables, vfork
from .channel import Channel, encode_stream
from .checkpoint import fork_checkpoint, watch_hooks
from .host_link import HostLink
from .shell import (
    NO_INSPECTION,
    ZMQShell,
    build_shell,
    completeness,
    completion,
    direct_outputs,
    inspection,
    no_completion,
    no_traces,
)
from .state_load import StateLoader
from .state_save import StateSaver
from .streams import Streams

SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"

_READY = {"type": "ready", "python": sys.version.split()[0]}

_MAX_FAILURES = 10
"""How often in a row no request is served before the runner ends."""
_ALL_TASKS: Any = getattr(asyncio.tasks, "_all_tasks", None)
"""The tasks of all loops, a WeakSet; up to Python 3.11."""
MAX_VARIABLES = 200
LONGEST_NAME = 200


class Runner(HostLink):
    """One IPython shell and, after `attach`, the connection to one host."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.shell: ZMQShell = build_shell()
        chart_libraries.register_charts(self.shell.display_formatter)
        comms.install(self.emit)
        self._awaits_go = False
        self.is_checkpoint = False
        self._finished: dict[str, Any] | None = None
        self._wakeup: asyncio.Future[None] | None = None

    def prepare(self) -> None:
        """Put our streams into `sys`, and our functions into the shell, `builtins` and `getpass`.

        A zygote does it once for all its forks, which then have other pipes at 1 and 2.
        """
        # Flush, because every fork would print again what modules have printed into the old streams' buffers.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.streams = Streams(self._synchronise, self._has_pending_result)
        self.shell.loop_runner = self._run_coroutine
        direct_outputs(self.shell, self.emit)
        self.shell.on_begin = self._begin
        self.shell.ask_form = self._ask_form
        self.shell.is_forked = lambda: self.channel.is_forked()
        os.register_at_fork(after_in_child=self._close_in_child)
        watch_hooks()
        builtins.input = self._input
        getpass.getpass = self._getpass

    def attach(self, channel: Channel) -> None:
        """Connect to the host. Everything that must not exist before a fork is made here."""
        self.channel = channel
        self.interrupts.install()
        self.loop = asyncio.new_event_loop()
        self.channel.send(_READY)

    def serve(self, environment: dict[str, str]) -> None:
        """Serve the session of a new process until the host closes the socket. `environment` is what `os.environ` has.

        A zygote's fork has it at hand; to read all of `os.environ` writes to 30 pages.
        """
        interpreter_state.remember_start(self.shell, environment)
        self.serve_requests()

    def serve_requests(self) -> None:
        """Serve requests until the host closes the socket."""
        failures = 0
        while True:
            # A child that a cell, a callback or a task forked returns to this loop too when its work is done.
            if self.channel.is_forked():
                self._end_child(0)
            try:
                self._serve_request(self._next())
                failures = 0
            except EOFError:
                if self.is_checkpoint:
                    os._exit(0)  # without flushing or exit functions, because these belong to the origin
                return
            except Exception:
                # A signal handler of the session's has raised while no cell ran. Where a cell has closed the socket, or
                # put something else in its place, this would go on for ever.
                failures += 1
                if failures > _MAX_FAILURES or not self.channel.is_open():
                    raise
                with contextlib.suppress(Exception):  # the handler may raise again
                    traceback.print_exc()

    def _serve_request(self, message: dict[str, Any]) -> None:
        # Interned, because Python does not find other names in its cache of what a class has.
        handler = getattr(self, sys.intern(f"_on_{message.get('op')}"), None)
        if handler is not None:
            handler(message)

    # Children that the session forks

    def _close_in_child(self) -> None:
        """Close the socket in a forked child, because the host would take it for open after the runner's death."""
        if fork.is_forking():
            return
        self.channel.close()
        if (wakeup := self._wakeup) is None:
            return
        # A task forked this child between two cells. No request will come, so the child ends with that task. It needs
        # an event loop with a selector of its own, because the old selector is shared with the parent.
        fork.own_loop(self.loop)
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

    # Requests that wait, and tasks that outlive their cell and run meanwhile

    def _on_attend(self, message: dict[str, Any]) -> None:
        """Answer a server that has taken over between two cells; it may have missed how the last cell ended."""
        self.channel.send({"type": "resumed", "id": message["id"], "last": self._finished})

    def _next(self) -> dict[str, Any]:
        if self._waiting:
            return self._waiting.popleft()
        if not self.channel.has_buffered() and self._has_background_tasks():
            self._run_background_tasks()
        return self.channel.receive()

    def _has_background_tasks(self) -> bool:
        # Look at all tasks first, because there are mostly none, and asking for the tasks of one loop touches 20 pages.
        if _ALL_TASKS is not None and not _ALL_TASKS.data:
            return False
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

    # Forks: kernels and checkpoints, see `fork`

    def _on_fork(self, message: dict[str, Any]) -> None:
        """Fork this session: a kernel, which has pipes of its own, or a checkpoint, which has a socket only."""
        descriptors = self.channel.take_descriptors()
        own = {self.channel.fileno(), *descriptors, *fork.loop_descriptors(self.loop)}
        threads = fork_losses.thread_ids()
        answer: dict[str, Any] = {"type": "forked", "id": message["id"], "lost": fork_losses.lost_in_fork(own, threads)}
        if message.get("is_elsewhere"):
            answer["lost"] += fork_losses.left_behind()
        reason = fork_losses.obstacle(len(threads))
        if not reason:
            self.streams.flush()
            if len(descriptors) > 1:
                fork.prepare_stir()
            folder = _folder()
            # Encode the answer before the fork, because each page written after it is in memory twice.
            encoded = self.channel.encode(answer)
            try:
                if len(descriptors) == 1:
                    is_fork = self._fork_checkpoint(descriptors, encoded)
                elif "entry" in message:
                    is_fork = self._fork_piece(descriptors, encoded, message, folder)
                else:
                    is_fork = self._fork_kernel(descriptors, encoded, message)
            except OSError as error:
                if self.channel.is_forked():
                    os._exit(errno.EIO)  # a fork that failed; the origin has the socket to the host
                reason = fork.reason_of(error)
            else:
                if is_fork:
                    self._become_fork(descriptors[: fork.DESCRIPTOR_COUNT], folder)
                return
        self._conclude_fork(descriptors, self.channel.encode({**answer, "error": reason}))

    def _fork_checkpoint(self, descriptors: list[int], answer: list[bytes]) -> bool:
        """Fork a checkpoint, which takes over the descriptor. Return whether this is the checkpoint."""
        # Counted again, because `obstacle` ends some threads, and a signal handler may have started one.
        has_threads = fork_losses.thread_count() > 1
        is_busy = has_threads or self._has_background_tasks() or self._waiting or self.channel.has_buffered()
        send = self.channel.send_encoded if is_busy else self.channel.send_and_wait
        # Its socket is a stream, also where that of the kernel is one of packets.
        return fork_checkpoint(descriptors[0], encode_stream(_READY), send, answer, has_threads=has_threads)

    def _fork_kernel(self, descriptors: list[int], answer: list[bytes], message: dict[str, Any]) -> bool:
        is_fork = fork.fork_kernel(
            descriptors,
            enter=partial(fork.await_sandbox, descriptors[0]) if message["is_elsewhere"] else None,
            is_hidden=not self.is_checkpoint,
            has_keeper=message["has_keeper"],
        )
        if not is_fork:
            self._conclude_fork(descriptors, answer)
            if self.is_checkpoint:
                fork.reap()
        return is_fork

    def _fork_piece(self, descriptors: list[int], answer: list[bytes], message: dict[str, Any], folder: str) -> bool:
        """Fork a kernel from a process in which nothing runs but forks, so that nobody sees its children.

        So it needs no process in between that hides it, and none that waits for the sandbox, which is there.
        """
        own, (holder,) = descriptors[: fork.DESCRIPTOR_COUNT], descriptors[fork.DESCRIPTOR_COUNT :]
        enter, is_fork = partial(fork.enter_sandbox, message["entry"], holder, []), False
        if not message["has_keeper"] and vfork.is_possible() and fork_losses.thread_count() == 1:
            fork.fork_kernel_at_once(enter, partial(self._become_piece, own, folder))
            # The change of user in our memory has made our entry in /proc root's.
            setns.own_proc_entry()
        else:
            is_fork = fork.fork_kernel(own, enter=enter, is_hidden=False, has_keeper=message["has_keeper"])
        if not is_fork:
            self._conclude_fork(descriptors, answer)
            fork.reap()
        return is_fork

    def _become_piece(self, descriptors: list[int], folder: str) -> None:
        """Serve as a fork until the host closes the socket, then exit: below is what serves the origin."""
        try:
            self._become_fork(descriptors, folder)
            self.serve_requests()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _conclude_fork(self, descriptors: list[int], answer: list[bytes]) -> None:
        """Close the fork's descriptors, and send the answer."""
        for descriptor in descriptors:
            os.close(descriptor)
        self.channel.send_encoded(answer)

    def _become_fork(self, descriptors: list[int], folder: str) -> None:
        self.is_checkpoint = len(descriptors) == 1
        self.streams.discard()
        if self.is_checkpoint:
            sock = socket.socket(fileno=descriptors[0])
        else:
            sock = fork.take_streams(descriptors)
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            setns.own_proc_entry()
        # Close it now, because the old socket object closes its descriptor when it is collected, and another file may
        # have that number by then.
        self.channel.close()
        self.channel = Channel(sock)
        self._waiting.clear()
        self._finished = None  # the origin's
        if not self.is_checkpoint:
            fork.detach_inherited({self.channel.fileno()})
            self.channel.send(_READY)
            try:
                # Not with the request to fork: what the origin has read, every later fork of it has in its memory.
                self._adopt_identity(self.channel.receive(), folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # a fork must not go on as the origin

    def _adopt_identity(self, identity: dict[str, Any], folder: str) -> None:
        """Give a forked kernel its own environment variables, package folders, working directory, loop and seeds."""
        os.environ.update(identity["environment"])
        interpreter_state.move_start(identity["environment"])
        for old, new in identity["moved"].items():
            fork.move_modules(old, new)
        # A process that has entered another sandbox has that sandbox's root as its working directory.
        for place in (folder, identity["folder"]):
            with contextlib.suppress(OSError):
                os.chdir(place)
                break
        self.loop = fork.own_loop(self.loop)
        fork.stir_random()
        if identity["reseed"]:
            fork.reseed()

    # Requests: `op` names the handler

    def _on_execute(self, message: dict[str, Any]) -> None:
        self._run(message, partial(self._run_cell, message["code"]))

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
        # Set it on the object, because a change of the class voids what Python has cached of the class's attributes.
        hook: Any = self.shell.displayhook
        hook.wants_value = bool(message.get("wants_value"))
        comms.reset_claims()
        self._awaits_go = bool(message.get("awaits_go"))
        self.streams.restore()
        if self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        count = self.shell.execution_count
        before = _cpu_s()
        is_ok = self._run_guarded(work)
        if self.channel.is_forked():
            self._end_child(0 if is_ok else 1)
        self._allow_input = False
        self._awaits_go = False  # still set after code that IPython could not parse
        self.streams.flush()
        result, self._pending_result = self._pending_result, None
        self._finished = {
            "type": "finished",
            "id": self._execution,
            "is_ok": is_ok,
            "execution_count": count,
            "cpu_s": _cpu_s() - before,
            "variables": self._variables(),
        }
        self.channel.send(*([result] if result else []), self._finished)
        self._execution = None

    def _run_cell(self, code: str) -> bool:
        if "gg" in code and rich_output.may_choose_agg(code):
            rich_output.show_with_agg()
        if "bokeh" in code and chart_libraries.imports_bokeh(code):
            chart_libraries.show_bokeh()
        outcome = self.shell.run_cell(code, store_history=True)
        publisher: Any = self.shell.display_pub
        comms.tell_states(publisher.emit)
        error = outcome.error_in_exec
        if isinstance(error, SystemExit) and self.channel.is_forked():
            self._end_child(_exit_status(error))
        return bool(outcome.success) or (isinstance(error, SystemExit) and error.code in (None, 0))

    def _run_guarded(self, work: Callable[[], bool]) -> bool:
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
        names: list[str] = []
        try:
            for name in shown:
                if type(name) is str and not name.startswith("_") and len(name) <= LONGEST_NAME:
                    names.append(name)
                    if len(names) == MAX_VARIABLES:
                        break
        except Exception:
            # A key that is no text, and whose `__hash__` or `__eq__` raises.
            names = list(itertools.islice(variables.shown_names(self.shell), MAX_VARIABLES))
        return names

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
        answer = no_completion(message["cursor"])
        with self._interruptible():
            answer = completion(self.shell, message["code"], message["cursor"])
        self.channel.send({**answer, "id": message["id"]})

    def _on_inspect(self, message: dict[str, Any]) -> None:
        answer = NO_INSPECTION
        with self._interruptible():
            answer = inspection(self.shell, message["code"], message["cursor"], message["detail"])
        self.channel.send({**answer, "id": message["id"]})

    def _on_check(self, message: dict[str, Any]) -> None:
        self.channel.send({**completeness(self.shell, message["code"]), "id": message["id"]})

    def _on_variables(self, message: dict[str, Any]) -> None:
        self._look(variables.answer_variables, variables.NO_VARIABLES, message)

    def _on_rows(self, message: dict[str, Any]) -> None:
        self._look(variables.answer_rows, variables.NO_ROWS, message)

    def _look(self, look: Callable[[Any, dict[str, Any]], dict[str, Any]], nothing: Any, message: Any) -> None:
        """Answer a question about variables, interruptible because a session may have replaced parts of libraries."""
        answer = nothing
        with contextlib.suppress(KeyboardInterrupt), self.interrupts.cell():
            self.interrupts.enable()
            answer = look(self.shell, message)
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

    def _transfer_state(self, message: dict[str, Any], work: "StateSaver | StateLoader") -> None:
        """Save or load state. That runs the session's code, so it is treated as a cell whose outputs are not shown."""
        self._execution = message["id"]
        self._allow_input = False
        self.streams.restore()
        with contextlib.suppress(KeyboardInterrupt), self.interrupts.cell():
            self._begin()
            work.run()
        work.finish()
        self.streams.flush()
        self._execution = self._pending_result = None
        self.channel.send({**work.report.message(), "id": message["id"]})


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
        return os.getcwd()  # noqa: PTH109 - see `fork.names_in`
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
    own, childrens = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + childrens.ru_utime + childrens.ru_stime


def main(descriptor: str) -> None:
    """Start without a zygote: build the shell, attach to the inherited socket, serve."""
    runner = Runner()
    runner.prepare()
    runner.attach(Channel(socket.socket(fileno=int(descriptor))))
    os.environ.setdefault("SHELL", SHELL)
    runner.serve(dict(os.environ))
