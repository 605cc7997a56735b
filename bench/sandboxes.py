"""What the glass costs: a process and a kernel started in it, and a loop that only computes."""

import os
import secrets
import time

from belljar.kernels.ipython import session_environment
from belljar.sandboxes import open_provider
from belljar.sandboxes.base import SandboxSpec
from belljar.sessions.session import SessionFolders
from bench.figures import Figure, Round, paired
from bench.one_plus_one import consume, timed
from bench.stage import Stage

LOOP = "sum(i * i for i in range(2_000_000))"


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
        *paired("sandbox", "python -c pass, start → end", [start], note=note),
        *paired("sandbox", "kernel, start → ready", [kernel]),
        *paired("sandbox", "2,000,000 turns of a loop", await _loops(stage)),
    ]


async def _process(stage: Stage, name: str) -> float:
    folders = SessionFolders(secrets.token_hex(8), stage.folder / "kernels" / secrets.token_hex(8))
    folders.make()
    spec = SandboxSpec(
        session_id=folders.session_id,
        workspace=folders.workspace,
        scratch=folders.scratch,
        home=folders.home,
        readable=(*stage.environment.readable, folders.layer),
    )
    provider = open_provider(name)
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


async def _loops(stage: Stage) -> list[Round]:
    async with stage.open_kernel("process") as plain, stage.open_kernel("namespace") as sealed:

        async def run_plain() -> None:
            await consume(plain, LOOP)

        async def run_sealed() -> None:
            await consume(sealed, LOOP)

        return [
            Round(await timed(run_plain, 2), await timed(run_sealed, 2))
            for _ in stage.rounds(stage.pick(5, 2), within_s=stage.pick(15, 4))
        ]
