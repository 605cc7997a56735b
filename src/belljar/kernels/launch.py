"""Starting the runner in a sandbox: its command, its environment variables, the wait until it is ready.

Also says in words how a process ended. Does not know what the runner is asked to do afterwards.
"""

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
from belljar.kernels.forked_process import UNKNOWN_STATUS, ForkedProcess
from belljar.kernels.wire import Wire
from belljar.outputs.events import Stream
from belljar.sandboxes.base import HOLD, Interruptible, Sandbox, SandboxProcess

# The runner is loaded by path under a name of its own, because the session's Python need not have belljar and the
# session's sys.path must not get our folder.
_BOOTSTRAP = (
    "import importlib.util as u, sys; path, support, part, *arguments = sys.argv[1:]; sys.argv = ['']; "
    "sys.path += [support] if support else []; "
    "spec = u.spec_from_file_location('belljar_runner', path + '/__init__.py', submodule_search_locations=[path]); "
    "module = u.module_from_spec(spec); sys.modules['belljar_runner'] = module; spec.loader.exec_module(module); "
    "from importlib import import_module; import_module('belljar_runner.' + part).main(*arguments)"
)
# The most that is kept of what a runner prints before it is ready, so that a flood does not fill our memory.
_MAX_OUTPUT_TAIL = 2_000
# How long to wait for the holder's exit status. A holder that has started the runner never ends.
_HOLDER_GRACE_S = 2.0


def runner_command(environment: Environment, part: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the runner, `part`, in the environment's Python."""
    return [str(environment.python), "-c", _BOOTSTRAP, str(RUNNER), str(environment.support or ""), part, *arguments]


def held_command(environment: Environment, command: Sequence[str], wire: Wire, forked: ForkedProcess) -> list[str]:
    """Return a command that holds the sandbox open and starts `command` beside it.

    The sandbox then outlives `command`, and so do checkpoints in it; see `inside/runner/holder.py`.
    """
    message = wire.encode_as_peer({"type": "sync"}).hex()
    arguments = (str(forked.child_end), str(wire.child_socket), message, str(int(forked.has_keeper)))
    return [str(environment.python), "-I", "-S", str(RUNNER / "holder.py"), *arguments, *HOLD, *command]


def session_environment(sandbox: Sandbox, environment: Environment, layer: Path | None) -> dict[str, str]:
    """Return all environment variables of a session; of the server's own only the time zone is passed on."""
    conda = {"CONDA_PREFIX": str(environment.prefix)} if environment.kind == "conda" else {}
    commands = [environment.python.parent]
    packages = [layer, MODULES] if layer else []
    if conda and layer:
        # These two folders exist only after conda packages were first installed for the session.
        commands.append(own_prefix(layer) / "bin")
        packages.insert(1, own_packages(layer, environment.version))
    return {
        "PATH": f"{os.pathsep.join(map(str, commands))}:/usr/local/bin:/usr/bin:/bin",
        "HOME": sandbox.home,
        "TMPDIR": sandbox.temporary,
        "USER": "belljar",
        "LANG": "C.UTF-8",
        "TZ": os.environ.get("TZ", ""),
        # A zygote has neither the layer nor MODULES here: each fork of it adds them where a cold start has them.
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PLOTLY_RENDERER": "plotly_mimetype",
        # pandas imports pyarrow, which would start a thread for an allocator that it does not use. Forks of a process
        # with one thread only are made twice as fast, and checkpoints of it take less memory.
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
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
    """Wait until the runner has attached; KernelStartFailed with the end of its output when it does not.

    `holder` is the process that starts the runner. It runs in the same interpreter, so it may be the one that failed.
    """
    output = ""
    protocol.build_reader()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                for item in await wire.receive():
                    if isinstance(process, ForkedProcess) and wire.peer_pid:
                        process.watch_pid(wire.peer_pid)
                    if isinstance(item, Stream):
                        output = (output + item.text)[-_MAX_OUTPUT_TAIL:]
                    elif isinstance(item, protocol.ReadyMessage):
                        return
    except TimeoutError:
        raise KernelStartFailed(f"the kernel was not ready after {timeout_s:g} s", hint=_output_hint(output)) from None
    except KernelDied:
        output += "".join(stream.text for stream in wire.drain())
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
        raise KernelStartFailed(fact, hint=_output_hint(output)) from None


def _output_hint(output: str) -> str:
    text = output.strip()[-_MAX_OUTPUT_TAIL:]
    return f"It said: {text}" if text else "It said nothing; `belljar doctor` checks the sandbox and the environment"


def cause_of(status: int) -> str:
    """Describe an exit status in words."""
    number = -status if status < 0 else status - 128 if status > 128 else 0
    with contextlib.suppress(ValueError):
        if number:
            return f"signal {signal.Signals(number).name}"
    return f"exit status {status}"


def send_interrupt(process: SandboxProcess, pidfd: int | None, pid: int) -> None:
    """Send SIGINT to a kernel's process: by its sandbox where that can, else by its pidfd, else by its pid."""
    with contextlib.suppress(ProcessLookupError):
        if isinstance(process, Interruptible):
            process.interrupt()
        elif pidfd is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGINT)
        else:
            os.kill(pid, signal.SIGINT)
