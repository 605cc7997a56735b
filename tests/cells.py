"""Opening kernels and running cells in them, for the tests of every kernel."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from belljar.environments import Environment
from belljar.kernels.base import Kernel, RehearsableKernel, is_forkable
from belljar.kernels.ipython import IPythonKernel, start_ipython
from belljar.kernels.launch import RUNNER, session_environment
from belljar.outputs.events import DisplayData, Event, ExecuteResult, Finished, InputRequest, MimeBundle, Raised, Stream
from belljar.provisioning.starter import KernelStarter
from belljar.sandboxes import providers
from belljar.sandboxes.base import ForkableProvider, Identity, Provider, Sandbox, SandboxSpec
from belljar.sessions.folders import SessionFolders
from belljar.settings import Settings
from shared_environment import shared_settings
from waiting import until

DEADLINE_S = 60
REPEAT_S = 5.0
JUPYTER = "jupyter:"
ORIGINS = ["forked", "pooled", "forked again", "rewound", "woken", "cold"]
"""How the kernel of a session can have come about; see `open_origin`."""
OnEvent = Callable[[Event], Awaitable[None]]


@dataclass(frozen=True)
class Outcome:
    """Everything a cell reported."""

    events: list[Event]

    @property
    def stdout(self) -> str:
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        return self._text("stderr")

    @property
    def result(self) -> MimeBundle | None:
        found = [event.data for event in self.events if isinstance(event, ExecuteResult)]
        return found[-1] if found else None

    @property
    def displays(self) -> list[DisplayData]:
        return [event for event in self.events if isinstance(event, DisplayData)]

    @property
    def questions(self) -> list[InputRequest]:
        return [event for event in self.events if isinstance(event, InputRequest)]

    @property
    def error(self) -> Raised:
        (found,) = [event for event in self.events if isinstance(event, Raised)]
        return found

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished)
        return self.events[-1]

    @property
    def is_ok(self) -> bool:
        return self.finished.is_ok

    def _text(self, name: str) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Stream) and event.name == name)


async def run(
    kernel: Kernel,
    code: str,
    *,
    allow_input: bool = False,
    on_event: OnEvent | None = None,
    on_begin: Callable[[], None] | None = None,
) -> Outcome:
    """Run a cell to its end."""
    events: list[Event] = []
    async with asyncio.timeout(DEADLINE_S):
        async for event in kernel.execute(code, allow_input=allow_input, on_begin=on_begin):
            events.append(event)
            if on_event is not None:
                await on_event(event)
    return Outcome(events)


async def interrupt_when_started(kernel: Kernel, code: str) -> Outcome:
    """Run a cell and interrupt it as soon as it says `started`.

    ipykernel can lose a signal that comes while it sends that word, so for it a second one may have to follow.
    """
    repeating: list[asyncio.Task[None]] = []

    async def repeat() -> None:
        while True:
            await asyncio.sleep(REPEAT_S)
            await kernel.interrupt()

    async def on_event(event: Event) -> None:
        if isinstance(event, Stream) and "started" in event.text and not repeating:
            await kernel.interrupt()
            repeating.append(asyncio.create_task(repeat()))

    try:
        return await run(kernel, code, on_event=on_event)
    finally:
        for task in repeating:
            task.cancel()


async def speak_between_cells(kernel: Kernel, workspace: Path, text: str) -> None:
    """Have a thread of the session say something while no cell runs."""
    code = (
        "import os, threading, time\n"
        "def speak():\n"
        "    while not os.path.exists('speak-now'): time.sleep(0.005)\n"
        f"    os.remove('speak-now'); print({text!r}, flush=True); open('spoken', 'w').close()\n"
        "threading.Thread(target=speak).start()"
    )
    assert (await run(kernel, code)).stdout == ""
    (workspace / "speak-now").touch()
    await until((workspace / "spoken").exists)
    (workspace / "spoken").unlink()


def shared_id(kind: str) -> str:
    """The session of the kernel that the tests of a module share."""
    return f"shared-{kind.partition(':')[0]}"


def usable(name: str) -> Provider:
    """The provider of that name, or a skipped test that says what the host lacks."""
    provider = providers(Settings())[name]
    for check in provider.check():
        if not check.is_ok:
            pytest.skip(f"{name}: {check.detail}")
    return provider


def kernelspecs(environment: Environment) -> Path:
    """Where an environment keeps its kernelspecs."""
    return environment.python.parent.parent / "share/jupyter/kernels"


@dataclass(frozen=True)
class Place:
    """A sandbox provider, an environment, and a folder to put sessions into."""

    provider: Provider
    environment: Environment
    folder: Path

    async def open_sandbox(self, session_id: str, readable: tuple[Path, ...] = ()) -> Sandbox:
        root = self.folder / session_id
        for name in ("workspace", "scratch", "home", "layer"):
            (root / name).mkdir(parents=True)
        trees = (*self.environment.readable, RUNNER, root / "layer", *readable)
        return await self.provider.open(
            SandboxSpec(session_id, self.workspace(session_id), root / "scratch", root / "home", trees)
        )

    def variables(self, sandbox: Sandbox, session_id: str) -> dict[str, str]:
        return session_environment(sandbox, self.environment, self.folder / session_id / "layer")

    def workspace(self, session_id: str = "s") -> Path:
        return self.folder / session_id / "workspace"

    async def start(self, kind: str, session_id: str = "s") -> Kernel:
        """Start a kernel of a kind: `ipython`, or `jupyter:NAME`."""
        if not kind.startswith(JUPYTER):
            sandbox = await self.open_sandbox(session_id)
            layer = self.folder / session_id / "layer"
            return await start_ipython(sandbox, self.environment, layer=layer, start_timeout_s=DEADLINE_S)
        from belljar.kernels import jupyter

        spec = jupyter.find_kernelspec(kind.removeprefix(JUPYTER), [kernelspecs(self.environment)])
        sandbox = await self.open_sandbox(session_id, jupyter.kernel_readable(spec))
        return await jupyter.start_jupyter(
            sandbox,
            spec,
            scratch=self.folder / session_id / "scratch",
            environment=self.variables(sandbox, session_id),
            start_timeout_s=DEADLINE_S,
        )

    @asynccontextmanager
    async def open(self, kind: str, session_id: str = "s") -> AsyncIterator[Kernel]:
        """A kernel that is closed at the end."""
        kernel = await self.start(kind, session_id)
        try:
            yield kernel
        finally:
            await kernel.aclose()


@dataclass(frozen=True)
class ForkingPlace(Place):
    """Where IPython kernels are forked from one warm process, as they are in a server."""

    starter: KernelStarter
    name: str = "default"
    """The environment's."""
    identities: dict[str, Identity | None] = field(default_factory=dict[str, Identity | None])
    """Of each session: its user on the host, where it has one."""

    def folders(self, session_id: str, *, fork_of: str = "") -> SessionFolders:
        """As a server has them: a fork is the same user as its parent."""
        if session_id not in self.identities:
            self.identities[session_id] = self.identities[fork_of] if fork_of else self.starter.provider.take_identity()
        return SessionFolders(session_id, self.folder / session_id, self.identities[session_id])

    async def start(self, kind: str, session_id: str = "s") -> IPythonKernel:
        folders = self.folders(session_id)
        folders.make()
        kernel = await self.starter.start(self.name, folders)
        assert isinstance(kernel, IPythonKernel)
        return kernel

    @asynccontextmanager
    async def open(self, kind: str = "ipython", session_id: str = "s") -> AsyncIterator[IPythonKernel]:
        kernel = await self.start(kind, session_id)
        try:
            yield kernel
        finally:
            await kernel.aclose()


def nesting() -> Provider:
    """The provider that sessions are forked behind, or a skipped test that says what the host lacks."""
    provider = usable("namespace")
    assert isinstance(provider, ForkableProvider)
    if gap := provider.no_nesting_reason():
        pytest.skip(f"no session can be forked here: {gap}")
    return provider


@asynccontextmanager
async def open_forking_place(environment: Environment, folder: Path, /, **flags: object) -> AsyncIterator[ForkingPlace]:
    """With a zygote that is warm, or as warm as it will be."""
    folder.chmod(0o711)  # sandboxes pass through it
    provider = nesting()
    settings = shared_settings().model_copy(update=flags)
    starter = KernelStarter(settings, provider, folder)
    try:
        await starter.wait_until_warm(settings.environment)
        yield ForkingPlace(provider, environment, folder, starter, settings.environment)
    finally:
        await starter.aclose()


@asynccontextmanager
async def open_place(name: str, environment: Environment, folder: Path) -> AsyncIterator[Place]:
    """Behind the provider of that name; `forked` is the default one with kernels that are forked."""
    if name == "forked":
        async with open_forking_place(environment, folder, preload=[]) as place:
            yield place
    else:
        yield Place(usable(name), environment, folder)


@asynccontextmanager
async def open_origin(
    place: Place, origin: str, session_id: str = "s", *, imported: str = "json"
) -> AsyncIterator[Kernel]:
    """A kernel of that origin; the place decides whether its first process was forked from a zygote or started cold.

    One that is woken finds a module among what was saved, and imports that before its first cell.
    """
    async with AsyncExitStack() as stack:
        first_id = f"before-{session_id}" if origin in ("forked again", "woken") else session_id
        kernel = await stack.enter_async_context(place.open("ipython", first_id))
        if origin == "pooled":
            assert isinstance(kernel, RehearsableKernel)
            await kernel.rehearse()
        elif origin == "forked again":
            assert isinstance(place, ForkingPlace)
            before, after = place.folders(first_id), place.folders(session_id, fork_of=first_id)
            after.make()
            kernel, _ = await place.starter.fork(kernel, before, after)
            stack.push_async_callback(kernel.aclose)
        elif origin == "rewound":
            assert is_forkable(kernel)
            kernel = await kernel.restore(await kernel.fork_checkpoint())
            stack.push_async_callback(kernel.aclose)
        elif origin == "woken":
            assert (await run(kernel, f"import {imported}")).is_ok
            assert isinstance(kernel, IPythonKernel)
            await kernel.save_state(f"{kernel.scratch}/state")
            if isinstance(place, ForkingPlace):
                place.folders(session_id, fork_of=first_id)  # the same user, who alone may read it
            kernel = await stack.enter_async_context(place.open("ipython", session_id))
            assert isinstance(kernel, IPythonKernel)
            scratch, scratch_before = (place.folder / each / "scratch" for each in (session_id, first_id))
            (scratch_before / "state").replace(scratch / "state")
            assert imported in (await kernel.load_state(f"{kernel.scratch}/state")).kept
        yield kernel
