"""How the runner is started in a sandbox and met there, cold or as a copy, and what is said of one that ended."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from belljar.environments.base import Environment
from belljar.environments.conda.prefix import own_packages, own_prefix
from belljar.errors import KernelDied, KernelStartFailed
from belljar.inside import MODULES, RUNNER
from belljar.kernels import protocol
from belljar.kernels.forked_process import HOLD, UNKNOWN_STATUS, ForkedProcess
from belljar.kernels.wire import Wire
from belljar.outputs.events import Stream
from belljar.sandboxes.base import Sandbox, SandboxProcess

# The runner is loaded by path under a name of its own: the session's Python need not have belljar, and the session's
# sys.path does not get our folder.
_BOOTSTRAP = (
    "import importlib.util as u, sys; path, support, part, *words = sys.argv[1:]; sys.argv = ['']; "
    "sys.path += [support] if support else []; "
    "spec = u.spec_from_file_location('belljar_runner', path + '/__init__.py', submodule_search_locations=[path]); "
    "module = u.module_from_spec(spec); sys.modules['belljar_runner'] = module; spec.loader.exec_module(module); "
    "from importlib import import_module; import_module('belljar_runner.' + part).main(*words)"
)
# Whoever floods its output before it is ready has no more than this of our memory.
_MOST_LAST_WORDS = 2_000
# One that has started the runner never ends.
_HOLDER_GRACE_S = 2.0


def runner_command(environment: Environment, part: str, *words: str) -> list[str]:
    """The command that runs a part of the runner in the environment's Python."""
    return [str(environment.python), "-c", _BOOTSTRAP, str(RUNNER), str(environment.support or ""), part, *words]


def held_command(environment: Environment, command: Sequence[str], wire: Wire, kept: ForkedProcess) -> list[str]:
    """A command that starts another one which the sandbox does not end with."""
    word = wire.word_of_peer({"type": "sync"}).hex()
    told = (str(kept.child_end), str(wire.child_socket), word, str(int(kept.has_keeper)))
    return [str(environment.python), "-I", "-S", str(RUNNER / "holder.py"), *told, *HOLD, *command]


def session_environment(sandbox: Sandbox, environment: Environment, layer: Path | None) -> dict[str, str]:
    """The variables a session sees, and no others: nothing of the server's own environment."""
    conda = {"CONDA_PREFIX": str(environment.prefix)} if environment.kind == "conda" else {}
    commands = [environment.python.parent]
    packages = [layer, MODULES] if layer else []
    if conda and layer:
        # There once packages of conda were installed for the session.
        commands.append(own_prefix(layer) / "bin")
        packages.insert(1, own_packages(layer, environment.version))
    return {
        "PATH": f"{os.pathsep.join(map(str, commands))}:/usr/local/bin:/usr/bin:/bin",
        "HOME": sandbox.home,
        "TMPDIR": sandbox.temporary,
        "USER": "belljar",
        "LANG": "C.UTF-8",
        "TZ": os.environ.get("TZ", ""),
        # What copies are made of has neither: each copy puts them where a cold start has them.
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PLOTLY_RENDERER": "plotly_mimetype",
        **conda,
    }


async def await_ready(
    wire: Wire,
    sandbox: Sandbox,
    process: SandboxProcess,
    timeout_s: float,
    *,
    holder: SandboxProcess | None = None,
) -> None:
    """Until the runner has attached; KernelStartFailed with its last words when it does not.

    `holder`: the process that starts the runner. It runs in the same interpreter, and may be the one that ended.
    """
    said = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                for item in await wire.receive():
                    if isinstance(process, ForkedProcess) and wire.peer_pid:
                        process.meet(wire.peer_pid)
                    if isinstance(item, Stream):
                        said = (said + item.text)[-_MOST_LAST_WORDS:]
                    elif isinstance(item, protocol.ReadyMessage):
                        return
    except TimeoutError:
        raise KernelStartFailed(f"the kernel was not ready after {timeout_s:g} s", hint=_last_words(said)) from None
    except KernelDied:
        said += "".join(stream.text for stream in wire.drain())
        status = await process.wait()
        if holder is not None and isinstance(process, ForkedProcess) and not process.pid:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HOLDER_GRACE_S):
                    status = await holder.wait()
        hit = "".join(f"; {incident.kind}: it {incident.detail}" for incident in sandbox.incidents())
        how = "" if status == UNKNOWN_STATUS else f" with {cause_of(status)}"
        fact = f"the kernel ended{how}{hit}"
        if isinstance(process, ForkedProcess) and process.complaint:
            fact = f"the kernel could not be forked: {process.complaint}"
        raise KernelStartFailed(fact, hint=_last_words(said)) from None


def _last_words(said: str) -> str:
    text = said.strip()[-_MOST_LAST_WORDS:]
    return f"It said: {text}" if text else "It said nothing; `belljar doctor` checks the sandbox and the environment"


def cause_of(status: int) -> str:
    """An exit status in words."""
    number = -status if status < 0 else status - 128 if status > 128 else 0
    with contextlib.suppress(ValueError):
        if number:
            return f"signal {signal.Signals(number).name}"
    return f"exit status {status}"


# What a process uses, as Linux's /proc tells it; nothing but zeros where there is none.


class ProcessUsage:
    """One process. Its files in /proc stay open, so that they can never mean a later process of the same number."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._status = self._open("status", os.O_RDONLY)
        self._clear = self._open("clear_refs", os.O_WRONLY)

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(self._folder / name, flags | os.O_CLOEXEC)
        except OSError:
            return -1

    def reset_peak(self) -> None:
        """Start the peak anew (proc(5), clear_refs); where that is refused, the peak is the session's."""
        with contextlib.suppress(OSError):
            os.write(self._clear, b"5")

    def peak_memory_mb(self) -> float:
        """The most that was resident since `reset_peak`."""
        return self._kilobytes(b"VmHWM:") / 1024

    def memory_mb(self) -> float:
        """What is resident now."""
        return self._kilobytes(b"VmRSS:") / 1024

    def _kilobytes(self, name: bytes) -> int:
        try:
            text = os.pread(self._status, 4096, 0)
            return int(text.partition(name)[2].split(None, 1)[0])
        except (OSError, ValueError, IndexError):
            return 0

    def cpu_s(self) -> float:
        """Processor time so far, with that of children that have ended; in steps of 10 ms."""
        try:
            text = (self._folder / "stat").read_text(errors="replace")
        except OSError:
            return 0.0
        # The name is in brackets and may hold blanks: fields are counted from the last bracket. utime to cstime.
        fields = text.rpartition(")")[2].split()[11:15]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Release the files; may be called twice."""
        for descriptor in (self._status, self._clear):
            if descriptor >= 0:
                os.close(descriptor)
        self._status = self._clear = -1
