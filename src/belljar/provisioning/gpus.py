"""Which GPUs the sessions of a runtime have: how many each may ask for, where it is placed, what it holds there.

A session is placed when its sandbox is opened, on the GPUs with the most room; sessions share GPUs. How many it has,
and which, is in a file of its folder, so that a session that wakes, or that an earlier server started, has as many
again. `sandboxes/gpus.py` knows the host, `gpu_monitor.py` the memory.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from belljar.errors import BelljarError, Busy, GpuUnavailable, InvalidArgument
from belljar.provisioning.gpu_monitor import GpuMemory, GpuMonitor, is_of_session
from belljar.sandboxes.base import DeviceProvider, HostCheck, Identity, Incident, Provider
from belljar.sandboxes.gpus import Gpu, GpuView, choose_gpus, driver_version, find_gpus, gpu_view, loader_variables
from belljar.settings import Settings

# A context of CUDA with torch's libraries takes 0.6 GB on an H200: with less than this free, not even that fits.
LEAST_FREE_MB = 1_024
SAMPLE_S = 0.5
FILE = "gpus.json"
MAX_BYTES = 64 * 1024
WITHOUT = "new_session(gpus=0) starts a session without one"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Holding:
    """How many GPUs a session has asked for, and those that it was placed on."""

    count: int
    gpus: tuple[Gpu, ...] = ()
    is_woken: bool = False
    """Whether it was read from the folder of a session that has been here before."""


@dataclass(slots=True)
class GpuPeak:
    """The most GPU memory that a session was seen with while a cell ran."""

    mb: float = 0.0
    free: dict[str, GpuMemory] = field(default_factory=dict[str, GpuMemory])
    """The memory of its GPUs when it was looked at last."""


class SessionGpus:
    """The GPUs of all sessions; `folder` has a folder for each session."""

    def __init__(self, settings: Settings, provider: Provider, folder: Path, monitor: GpuMonitor | None = None) -> None:
        self._settings = settings
        self.is_on = bool(settings.gpus) or any(entry.gpus for entry in settings.environments.values())
        """Whether any session may have a GPU."""
        self._provider = provider
        self._folder = folder
        self.monitor = monitor or GpuMonitor()
        self._holdings: dict[str, Holding] = {}
        self._placing = asyncio.Lock()

    # How many

    def default_count(self, environment: str) -> int:
        """Return how many GPUs a session gets that does not ask."""
        most = self._settings.max_gpus
        if not self._named(environment) or most == 0:
            return 0
        return self._settings.session_gpus if most is None else min(self._settings.session_gpus, most)

    def count(self, environment: str, asked: int | None) -> int:
        """Return how many GPUs a new session gets; refuse more than it may have, or than there are."""
        if asked is None:
            return self.default_count(environment)
        if asked < 0:
            raise InvalidArgument(f"gpus is {asked}", hint="Give the number of GPUs, 0 for none")
        if asked == 0:
            return 0
        if not self._named(environment):
            raise InvalidArgument(
                f"sessions of environment {environment[:80]!r} get no GPU here",
                hint="Leave gpus out; only the operator can change it, with the setting gpus",
            )
        most = self._settings.max_gpus
        if most is not None and asked > most:
            raise InvalidArgument(f"gpus is {asked}, and a session may have {most}", hint=f"Ask for {most} at most")
        there = len(self._allowed(environment))
        if asked > there:
            fact = f"gpus is {asked}, and there are {there} for sessions"
            raise InvalidArgument(fact, hint=f"Ask for {there} at most")
        return asked

    def _named(self, environment: str) -> Sequence[str]:
        """Return the setting that holds for an environment."""
        entry = self._settings.environments.get(environment)
        return self._settings.gpus if entry is None or entry.gpus is None else entry.gpus

    def _allowed(self, environment: str) -> list[Gpu]:
        if not isinstance(self._provider, DeviceProvider):
            raise GpuUnavailable(
                f"the sandbox {self._provider.name} gives no GPU to sessions", hint="Set sandbox to namespace"
            )
        return choose_gpus(self._named(environment), self.found())

    def found(self) -> list[Gpu]:
        """Return the GPUs of this host, MIG instances in place of GPUs that are partitioned."""
        wants_instances = any(
            entry.startswith("MIG-") or entry == "all"
            for named in (self._settings.gpus, *(entry.gpus or () for entry in self._settings.environments.values()))
            for entry in named
        )
        return find_gpus(self.monitor.partitions() if wants_instances else ())

    # Who has which

    def request(self, session_id: str, count: int) -> None:
        """Note how many GPUs a session shall be given when it starts."""
        self._holdings[session_id] = Holding(count)
        self._write(session_id)

    async def place(self, session_id: str, environment: str) -> None:
        """Choose the GPUs of a session whose sandbox is about to be opened; those of an earlier one are given up."""
        if not self.is_on:
            return
        holding = self._holding(session_id) or Holding(self.default_count(environment))
        if holding.count == 0:
            return
        async with self._placing:
            # Given up first, so that a session does not count as its own neighbour.
            self._holdings[session_id] = placed = replace(holding, gpus=())
            try:
                gpus = await asyncio.to_thread(self._choose, environment, holding.count)
            except (GpuUnavailable, Busy) as error:
                if not holding.is_woken:
                    raise type(error)(error.message, hint=f"{error.hint}. {WITHOUT}") from error
                # Its variables are worth more than its GPU: torch's tensors are loaded into the host's memory.
                log.warning("session %s wakes without its GPU: %s", session_id, error.message)
                gpus = []
            placed.gpus = tuple(sorted(gpus, key=lambda gpu: gpu.index))
        self._write(session_id)

    def _choose(self, environment: str, count: int) -> list[Gpu]:
        """Return the GPUs for a session; refuse where there are too few, or no room, or something is missing."""
        allowed = self._allowed(environment)
        if len(allowed) < count:
            raise GpuUnavailable(
                f"the session has {count} GPUs, and {len(allowed)} are there", hint="See that its driver is loaded"
            )
        memory = self.monitor.memory()
        chosen = self._with_most_room(allowed, memory)[:count]
        gpu_view(chosen)
        for gpu in chosen:
            known = memory.get(gpu.uuid)
            if known is not None and known.free_mb < LEAST_FREE_MB:
                room = f"{known.free_mb:,.0f} of {known.total_mb:,.0f} MB free"
                raise Busy(
                    f"no GPU has room: the best, GPU {gpu.index}, has {room}",
                    hint="Try again when another session has ended, or clear one of yours",
                )
        return chosen

    def _with_most_room(self, gpus: Sequence[Gpu], memory: dict[str, GpuMemory]) -> list[Gpu]:
        """Return GPUs, the best place first. A session that was placed and holds nothing yet counts as 1 GB."""
        sessions = Counter(gpu.uuid for holding in self._holdings.values() for gpu in holding.gpus)

        def expected_mb(gpu: Gpu) -> float:
            free_mb = memory[gpu.uuid].free_mb if gpu.uuid in memory else 0.0
            return free_mb - LEAST_FREE_MB * sessions[gpu.uuid]

        return sorted(gpus, key=lambda gpu: (-expected_mb(gpu), gpu.index, gpu.uuid))

    def of(self, session_id: str) -> tuple[Gpu, ...]:
        """Return the GPUs that a session is placed on."""
        holding = self._holding(session_id) if self.is_on else None
        return holding.gpus if holding else ()

    def inherit(self, session_id: str, origin: str) -> None:
        """Give a fork the GPUs of the session that it is forked from."""
        if self.is_on and (holding := self._holding(origin)) is not None:
            self._holdings[session_id] = Holding(holding.count, holding.gpus)
            self._write(session_id)

    def release(self, session_id: str) -> None:
        """Count a session no longer, because its processes have ended."""
        self._holdings.pop(session_id, None)

    def _holding(self, session_id: str) -> Holding | None:
        if session_id not in self._holdings and (known := self._read(session_id)) is not None:
            self._holdings[session_id] = known
        return self._holdings.get(session_id)

    def _write(self, session_id: str) -> None:
        holding, folder = self._holdings[session_id], self._folder / session_id
        text = json.dumps({"count": holding.count, "uuids": [gpu.uuid for gpu in holding.gpus]})
        if folder.is_dir():  # a program has none
            with contextlib.suppress(OSError):  # then a session that wakes gets as many as one that does not ask
                (folder / FILE).write_text(text)

    def _read(self, session_id: str) -> Holding | None:
        try:
            with (self._folder / session_id / FILE).open("rb") as file:
                record = json.loads(file.read(MAX_BYTES))
            count, uuids = int(record["count"]), {str(uuid) for uuid in record["uuids"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        with contextlib.suppress(BelljarError):
            return Holding(count, tuple(gpu for gpu in self.found() if gpu.uuid in uuids), is_woken=True)
        return Holding(count, is_woken=True)

    # What it sees and holds

    def view(self, session_id: str, identity: Identity | None) -> GpuView:
        """Return what the sandbox of a session shows for its GPUs."""
        gpus = self.of(session_id)
        view = gpu_view(gpus, identity)
        if not gpus or self._provider.isolates:
            return view
        # Where nothing hides the other devices, the libraries are at least told which to use.
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus if gpu.maker == "nvidia")}
        return GpuView(view.devices, view.readable, {**chosen, **(view.variables or {})}, view.programs)

    def readable(self) -> tuple[Path, ...]:
        """Return the trees that sessions with a GPU are shown, whichever GPU it is."""
        with contextlib.suppress(BelljarError):
            return gpu_view(self.found()).readable if self.is_on else ()
        return ()

    def loader_variables(self) -> dict[str, str]:
        """Return variables for the processes that sessions are forked from."""
        return loader_variables() if self.is_on else {}

    def memory_mb(self, session_id: str, kernel_pid: int) -> float:
        """Return the GPU memory that a session's processes hold; 0 where that is not known. Call it in a thread."""
        if not kernel_pid or not self.of(session_id):
            return 0.0
        processes = self.monitor.processes()
        return sum(size for pid, size in processes.items() if is_of_session(pid, kernel_pid))

    @asynccontextmanager
    async def watching(self, session_id: str, kernel_pid: int) -> AsyncGenerator[GpuPeak]:
        """Look at the GPU memory of a session every half second until the block ends, and once more at its end."""
        peak = GpuPeak()
        if not self.of(session_id):
            yield peak
            return

        async def look() -> None:
            peak.mb = max(peak.mb, await asyncio.to_thread(self.memory_mb, session_id, kernel_pid))

        async def look_again() -> None:
            while True:
                await asyncio.sleep(SAMPLE_S)
                await look()

        task = asyncio.get_running_loop().create_task(look_again())
        try:
            yield peak
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await look()

    async def shortage(self, session_id: str, kernel_pid: int) -> Incident:
        """Return the incident of a cell that found no more memory on its GPU."""
        held_mb = await asyncio.to_thread(self.memory_mb, session_id, kernel_pid)
        memory = await asyncio.to_thread(self.monitor.memory)
        rooms = [
            f"GPU {gpu.index} has {memory[gpu.uuid].free_mb:,.0f} of {memory[gpu.uuid].total_mb:,.0f} MB free"
            for gpu in self.of(session_id)
            if gpu.uuid in memory
        ]
        held = [f"it holds {held_mb:,.0f} MB now"] if held_mb else []
        return Incident("gpu_out_of_memory", ", ".join(["asked for more GPU memory than is free", *held, *rooms]))

    def loss(self, session_id: str) -> Incident | None:
        """Return the incident of a session whose GPU was taken away since it started; None if it is there."""
        gpus = self.of(session_id)
        try:
            here = {gpu.uuid for gpu in self.found()} if gpus else set[str]()
            gone = next((gpu for gpu in gpus if gpu.uuid not in here), None)
            if gone is not None:
                return Incident("gpu_lost", f"lost {gone}: this host has it no more")
            gpu_view(gpus)
        except GpuUnavailable as error:
            return Incident("gpu_lost", f"cannot use its GPU any more: {error.message}")
        return None

    # For operators

    def warn(self) -> None:
        """Log what keeps sessions from the GPUs that the settings name. Call it in a thread, when a server starts.

        The server starts all the same: sessions that ask for no GPU can be had.
        """
        if self.is_on and not (check := self.check()).is_ok:
            log.warning("sessions get no GPU: %s. %s", check.detail, check.hint)

    def check(self) -> HostCheck:
        """Return the line for `doctor`."""
        found = find_gpus()
        listed = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.uuid})" for gpu in found)
        if not found:
            return HostCheck("gpus", is_ok=not self.is_on, detail="none found")
        driver = f", driver {driver_version()}" if driver_version() else ""
        if not self.is_on:
            return HostCheck(
                "gpus", is_ok=True, detail=f"{listed}{driver}; sessions get none", hint='set gpus = "all" to give them'
            )
        try:
            names = [self._settings.environment, *self._settings.environments]
            gpu_view([gpu for name in names for gpu in (self._allowed(name) if self._named(name) else [])])
        except GpuUnavailable as error:
            return HostCheck("gpus", is_ok=False, detail=error.message, hint=error.hint)
        self.monitor.memory()
        unmeasured = f"; their memory is not measured: {self.monitor.failure}" if self.monitor.failure else ""
        return HostCheck("gpus", is_ok=True, detail=f"{listed}{driver}{unmeasured}")
