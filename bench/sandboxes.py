"""What the glass costs, limits included: a process, a kernel and a first result in it, and three kinds of work.

The first result is measured for every provider that this host has; what it lacks is said and left out.
"""

import os
import secrets
import sys
import time
from functools import partial

from belljar.errors import BelljarError
from belljar.kernels.launch import session_environment
from belljar.provisioning.sandbox_specs import limits_of
from belljar.sandboxes import open_provider, providers
from belljar.sandboxes.base import SandboxSpec
from belljar.sessions.folders import SessionFolders
from bench.figures import Figure, Round, paired
from bench.one_plus_one import TURN, consume, taken_in_turns
from bench.stage import Stage

START_TARGET = 2.0
CPU_TARGET = 1.02
WORK = {
    "2,000,000 turns of a loop": ("sum(i * i for i in range(2_000_000))", CPU_TARGET),
    "300 files made, read and removed": (
        "import os\nfor n in range(300):\n    with open(str(n), 'w') as f: f.write('x' * 4096)\n"
        "    with open(str(n)) as f: f.read()\n    os.remove(str(n))",
        None,
    ),
    "100,000 system calls": ("import os\nfor _ in range(100_000): os.getppid()", None),
}


async def measure(stage: Stage) -> list[Figure]:
    """The `process` sandbox, which isolates nothing, is the peer."""
    start, kernel = Round(), Round()
    for _ in stage.rounds(stage.pick(10, 4), within_s=stage.pick(20, 6)):
        start.peer.append(await _process(stage, "process"))
        start.ours.append(await _process(stage, "namespace"))
        kernel.peer.append(await _kernel(stage, "process"))
        kernel.ours.append(await _kernel(stage, "namespace"))
    note = f"peer: the process sandbox; n={len(start.ours)}"
    return [
        *paired("sandbox", "python -c pass, start → end", [start], target=START_TARGET, note=note),
        *paired("sandbox", "kernel, start → ready", [kernel], target=START_TARGET),
        *await _first_results(stage),
        *await _work(stage),
    ]


async def _first_results(stage: Stage) -> list[Figure]:
    """From nothing to the result of `1+1`, each provider in turn with the peer."""
    taken = {name: Round() for name in _usable(stage)}
    for _ in stage.rounds(stage.pick(6, 3), within_s=stage.pick(40, 15)):
        peer = await _first_result(stage, "process")
        for name in [*taken]:
            try:
                took = await _first_result(stage, name)
            except BelljarError as error:
                _leave_out(name, str(error))
                del taken[name]
            else:
                taken[name].peer.append(peer)
                taken[name].ours.append(took)
    return [
        figure
        for name, samples in taken.items()
        for figure in paired("sandbox", f"start → 1+1, {name}", [samples], note=f"n={len(samples.ours)}")
    ]


def _usable(stage: Stage) -> list[str]:
    """The providers that isolate and can run here."""
    usable: list[str] = []
    for name, provider in providers(stage.settings()).items():
        failed = [check for check in provider.check() if not check.is_ok]
        if failed:
            _leave_out(name, f"{failed[0].name}: {failed[0].detail}")
        elif provider.isolates:
            usable.append(name)
    return usable


def _leave_out(name: str, why: str) -> None:
    print(f"sandbox: {name} is left out: {why}", file=sys.stderr, flush=True)


async def _first_result(stage: Stage, name: str) -> float:
    began = time.perf_counter()
    async with stage.open_kernel(name) as kernel:
        await consume(kernel, "1+1")
        return time.perf_counter() - began


async def _process(stage: Stage, name: str) -> float:
    provider = open_provider(stage.settings(name))
    folder = stage.folder / "kernels" / secrets.token_hex(8)
    folders = SessionFolders(secrets.token_hex(8), folder, provider.take_identity())
    folders.make()
    spec = SandboxSpec(
        session_id=folders.session_id,
        workspace=folders.workspace,
        scratch=folders.scratch,
        home=folders.home,
        readable=(*stage.environment.readable, folders.layer),
        limits=limits_of(stage.settings(name)),
        identity=folders.identity,
    )
    nothing = os.open(os.devnull, os.O_WRONLY)
    began = time.perf_counter()
    sandbox = await provider.open(spec)
    try:
        variables = session_environment(sandbox, stage.environment, folders.layer)
        command = [str(stage.environment.python), "-c", "pass"]
        process = await sandbox.spawn(command, environment=variables, stdout=nothing, stderr=nothing)
        if status := await process.wait():
            raise RuntimeError(f"python -c pass ended with status {status} in the {name} sandbox")
        return time.perf_counter() - began
    finally:
        await sandbox.aclose()
        os.close(nothing)


async def _kernel(stage: Stage, name: str) -> float:
    began = time.perf_counter()
    async with stage.open_kernel(name):
        return time.perf_counter() - began


async def _work(stage: Stage) -> list[Figure]:
    figures: list[Figure] = []
    async with stage.open_kernel("process") as plain, stage.open_kernel("namespace") as sealed:
        for what, (code, target) in WORK.items():
            rounds = [
                await taken_in_turns(partial(consume, plain, code), partial(consume, sealed, code), TURN)
                for _ in stage.rounds(stage.pick(8, 3), within_s=stage.pick(15, 4))
            ]
            figures += paired("sandbox", what, rounds, target=target)
    return figures
