"""The default kernel: IPython's shell in our own runner, inside the sandbox."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from belljar.environments.base import Environment
from belljar.errors import KernelDied, KernelStartFailed
from belljar.kernels import frames
from belljar.kernels.base import Completion
from belljar.kernels.imports import ImportProof
from belljar.kernels.usage import Usage
from belljar.outputs.events import (
    ClearOutput,
    DisplayData,
    Event,
    ExecuteResult,
    Finished,
    InputRequest,
    Raised,
    Stream,
)
from belljar.sandboxes.base import Incident, Interruptible, Sandbox, SandboxProcess
from belljar.sandboxes.child import open_pidfd

RUNNER = Path(__file__).parent / "runner"

# The runner is loaded by path under a name of its own: the session's Python need not have belljar, and the session's
# sys.path does not get our folder.
_BOOTSTRAP = (
    "import importlib.util as u, sys; path, descriptor = sys.argv[1:]; sys.argv = ['']; "
    "spec = u.spec_from_file_location('belljar_runner', path + '/__init__.py', submodule_search_locations=[path]); "
    "module = u.module_from_spec(spec); sys.modules['belljar_runner'] = module; spec.loader.exec_module(module); "
    "from belljar_runner.serving import main; main(int(descriptor))"
)
# A process that ended has closed its socket a moment before it can be waited for.
EXIT_GRACE_S = 2.0
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


async def start_ipython(
    sandbox: Sandbox, environment: Environment, *, layer: Path, start_timeout_s: float
) -> "IPythonKernel":
    """Start the runner cold and wait until it has attached."""
    wire = frames.Wire()
    try:
        process = await sandbox.spawn(
            [str(environment.python), "-c", _BOOTSTRAP, str(RUNNER), str(wire.child_socket)],
            environment=session_environment(sandbox, environment, layer),
            stdout=wire.child_stdout,
            stderr=wire.child_stderr,
            pass_fds=[wire.child_socket],
        )
        wire.close_child_ends()
        await _await_ready(wire, sandbox, process, start_timeout_s)
    except BaseException:
        wire.close()
        await sandbox.aclose()
        raise
    return IPythonKernel(wire, sandbox, process)


def session_environment(sandbox: Sandbox, environment: Environment, layer: Path) -> dict[str, str]:
    """The variables a session sees, and no others: nothing of the server's own environment."""
    return {
        "PATH": f"{environment.python.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": sandbox.home,
        "TMPDIR": sandbox.temporary,
        "USER": "belljar",
        "LANG": "C.UTF-8",
        "TZ": os.environ.get("TZ", ""),
        "PYTHONPATH": str(layer),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PLOTLY_RENDERER": "plotly_mimetype",
    }


async def _await_ready(wire: frames.Wire, sandbox: Sandbox, process: SandboxProcess, timeout_s: float) -> None:
    said: list[str] = []
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                for item in await wire.receive():
                    if isinstance(item, Stream):
                        said.append(item.text)
                    elif isinstance(item, frames.Ready):
                        return
    except TimeoutError:
        raise KernelStartFailed(f"the kernel was not ready after {timeout_s:g} s", hint=_last_words(said)) from None
    except KernelDied:
        said += [stream.text for stream in wire.drain()]
        status = await process.wait()
        hit = "".join(f"; {incident.kind}: it {incident.detail}" for incident in sandbox.incidents())
        raise KernelStartFailed(f"the kernel ended with {cause_of(status)}{hit}", hint=_last_words(said)) from None


def _last_words(said: list[str]) -> str:
    text = "".join(said).strip()[-2000:]
    return f"It said: {text}" if text else "It said nothing; `belljar doctor` checks the sandbox and the environment"


def cause_of(status: int) -> str:
    """An exit status in words."""
    number = -status if status < 0 else status - 128 if status > 128 else 0
    with contextlib.suppress(ValueError):
        if number:
            return f"signal {signal.Signals(number).name}"
    return f"exit status {status}"


class IPythonKernel:
    """One runner. Between cells nothing is read, so background output waits in the pipes for the next cell."""

    name = "ipython"

    def __init__(self, wire: frames.Wire, sandbox: Sandbox, process: SandboxProcess) -> None:
        self._wire = wire
        self._sandbox = sandbox
        self._process = process
        # What a sandbox carries for its peer over a connection comes from this very process.
        self._pid = process.pid if wire.peer_pid in (0, os.getpid()) else wire.peer_pid
        self._usage = Usage(self._pid)
        # Held from the start, so that an interrupt can never reach a later process of the same number.
        self._pidfd = open_pidfd(self._pid)
        self._last_id = 0
        self._is_asking = False
        self._early: list[Stream] = []

    async def execute(self, code: str, *, allow_input: bool) -> AsyncIterator[Event]:
        """See the contract."""
        self._last_id += 1
        self._usage.reset_peak()
        early, self._early = self._early, []
        for stream in early:
            yield stream
        try:
            await self._wire.send(
                {"op": "execute", "id": self._last_id, "code": code, "allow_input": allow_input},
            )
            self._wire.expect_answer()
            while True:
                for item in await self._wire.receive():
                    event = item if isinstance(item, Stream) else self._event(item)
                    if event is not None:
                        yield event
                    if isinstance(event, Finished):
                        return
        except KernelDied as gone:
            raise await self._death(gone) from None

    def _event(self, message: frames.Message) -> Event | None:
        if message.id != self._last_id:
            return None
        match message:
            case frames.Display():
                return DisplayData(message.data, message.display_id, message.update)
            case frames.Clear():
                return ClearOutput(message.wait)
            case frames.Result():
                return ExecuteResult(message.data)
            case frames.Error():
                lines = [plain_text(line) for line in message.traceback]
                return Raised(message.name, plain_text(message.message), lines)
            case frames.Input():
                self._is_asking = True
                return InputRequest(message.prompt, message.is_password)
            case frames.Done():
                return Finished(
                    message.is_ok,
                    message.execution_count,
                    message.cpu_s,
                    max(self._usage.peak_memory_mb(), self._sandbox.memory_peak_mb()),
                    tuple(message.variables),
                )
            case _:
                return None

    async def _death(self, gone: KernelDied) -> KernelDied:
        """Why the peer fell silent: its exit status if it ended, our own complaint if it broke the form."""
        is_protocol_breach = gone.message != frames.GONE
        status: int | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if is_protocol_breach else EXIT_GRACE_S):
                status = await self._process.wait()
        await self._sandbox.kill()
        if status is not None:
            return KernelDied(f"the kernel's process ended with {cause_of(status)}")
        fault = gone.message if is_protocol_breach else "the cell closed the kernel's connection"
        return KernelDied(f"{fault}, so its process was ended")

    def is_alive(self) -> bool:
        """See the contract."""
        return not self._wire.is_hung_up()

    async def reply_input(self, text: str | None) -> None:
        """See the contract."""
        self._is_asking = False
        await self._wire.send({"op": "input", "value": text})

    async def interrupt(self) -> None:
        """SIGINT for a busy cell; a cell that waits for input reads its interrupt from the socket."""
        if self._is_asking:
            self._is_asking = False
            await self._wire.send({"op": "input", "is_interrupt": True})
            return
        # The message first: a cell that has not begun when the signal comes finds it there and does not begin.
        with contextlib.suppress(ProcessLookupError, KernelDied):
            await self._wire.send({"op": "interrupt", "id": self._last_id})
            if isinstance(self._process, Interruptible):
                self._process.interrupt()
            elif self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGINT)
            else:
                os.kill(self._pid, signal.SIGINT)

    async def complete(self, code: str, cursor: int) -> Completion:
        """See the contract."""
        self._last_id += 1
        await self._wire.send({"op": "complete", "id": self._last_id, "code": code, "cursor": cursor})
        while True:
            for item in await self._wire.receive():
                if isinstance(item, Stream):
                    self._early.append(item)
                elif isinstance(item, frames.Completed) and item.id == self._last_id:
                    return Completion(item.matches, item.start, item.end)

    async def prove_imports(self, modules: Sequence[str], *, watched: Sequence[str]) -> ImportProof:
        """See `ProvesImports`. What the modules print is nobody's output."""
        self._last_id += 1
        request = {"op": "import", "id": self._last_id, "modules": [*modules], "watched": [*watched]}
        await self._wire.send(request)
        while True:
            for item in await self._wire.receive():
                if isinstance(item, frames.Imported) and item.id == self._last_id:
                    return ImportProof(frozenset(item.loaded), item.errors)

    async def kill(self) -> None:
        """See the contract."""
        await self._sandbox.kill()

    async def aclose(self) -> None:
        """See the contract."""
        await self._sandbox.aclose()
        self._wire.close()
        self._usage.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def incidents(self) -> list[Incident]:
        """See the contract."""
        return self._sandbox.incidents()

    def memory_mb(self) -> float:
        """See the contract."""
        return self._usage.memory_mb()


def plain_text(text: str) -> str:
    """Without ANSI codes: tracebacks are for models and pages, not for terminals."""
    return _ANSI.sub("", text) if "\x1b" in text else text
