"""How the runner is started in a sandbox and met there, cold or as a copy, and what is said of one that ended."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from belljar.environments.base import Environment
from belljar.environments.prefixes import own_packages, own_prefix
from belljar.errors import KernelDied, KernelStartFailed
from belljar.kernels import frames, messages
from belljar.kernels.copies import HOLD, UNKNOWN_STATUS, KeptProcess
from belljar.outputs.events import Stream
from belljar.sandboxes.base import Sandbox, SandboxProcess

RUNNER = Path(__file__).parent / "runner"
MODULES = RUNNER / "modules"
"""What every session can import of ours: `workspace_state`."""

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


def held_command(environment: Environment, command: Sequence[str], wire: frames.Wire, kept: KeptProcess) -> list[str]:
    """A command that starts another one which the sandbox does not end with."""
    word = wire.word_of_peer({"type": "sync"}).hex()
    told = (str(kept.child_end), str(wire.child_socket), word, str(int(kept.has_keeper)))
    return [str(environment.python), "-I", "-S", str(RUNNER / "holding.py"), *told, *HOLD, *command]


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
    wire: frames.Wire,
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
                    if isinstance(process, KeptProcess) and wire.peer_pid:
                        process.meet(wire.peer_pid)
                    if isinstance(item, Stream):
                        said = (said + item.text)[-_MOST_LAST_WORDS:]
                    elif isinstance(item, messages.Ready):
                        return
    except TimeoutError:
        raise KernelStartFailed(f"the kernel was not ready after {timeout_s:g} s", hint=_last_words(said)) from None
    except KernelDied:
        said += "".join(stream.text for stream in wire.drain())
        status = await process.wait()
        if holder is not None and isinstance(process, KeptProcess) and not process.pid:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HOLDER_GRACE_S):
                    status = await holder.wait()
        hit = "".join(f"; {incident.kind}: it {incident.detail}" for incident in sandbox.incidents())
        how = "" if status == UNKNOWN_STATUS else f" with {cause_of(status)}"
        fact = f"the kernel ended{how}{hit}"
        if isinstance(process, KeptProcess) and process.complaint:
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
