"""What every session's sandbox is furnished with: what it shows, may use and reach, and the hatches it calls us by.

Knows nothing of kernels.
"""

import asyncio
import math
import os
from collections.abc import Mapping
from pathlib import Path

from belljar.egress.rules import PACKAGES, parse_rules
from belljar.egress.session_sockets import SessionSocket
from belljar.environments import Environment
from belljar.environments.install_room import InstallRoom
from belljar.environments.package_index import index_variables
from belljar.inside import FOLDER
from belljar.provisioning.confined_uv import UvSandbox
from belljar.provisioning.folders import KernelFolders
from belljar.provisioning.session_services import Egress, ServicedSandbox, open_services
from belljar.provisioning.skills import Skills
from belljar.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec
from belljar.settings import Settings
from belljar.toolbox.toolbox import Toolbox


class SpecBuilder:
    """What the settings, the workshop and the toolbox have for every sandbox of a provider."""

    def __init__(
        self,
        settings: Settings,
        provider: Provider,
        workshop: UvSandbox,
        toolbox: Toolbox | None,
        skills: Skills | None = None,
    ) -> None:
        self._settings = settings
        self._provider = provider
        self._workshop = workshop
        self._toolbox = toolbox
        self._skills = skills

    def spec(self, folders: KernelFolders, readable: tuple[Path, ...], *, has_tools: bool = True) -> SandboxSpec:
        """What a session's sandbox is to be like."""
        for shown in (self._toolbox, self._skills) if has_tools else ():
            if shown is not None:
                shown.show_in(folders.workspace, folders.identity)
                readable = (*readable, *shown.readable)
        return SandboxSpec(
            session_id=folders.session_id,
            workspace=folders.workspace,
            scratch=folders.scratch,
            home=folders.home,
            readable=readable,
            limits=limits_of(self._settings),
            identity=folders.identity,
        )

    def zygote_spec(self, environment: Environment, name: str, folder: Path) -> SandboxSpec:
        """The same for what sessions are forked from."""
        return SandboxSpec(
            session_id=name,
            workspace=folder / "workspace",
            scratch=folder / "scratch",
            home=folder / "home",
            # A branch can be shown only what its trunk was.
            readable=(*environment.readable, FOLDER, *self._shown()),
            limits=limits_of(self._settings),
        )

    def _shown(self) -> tuple[Path, ...]:
        return tuple(path for each in (self._toolbox, self._skills) if each is not None for path in each.readable)

    async def with_services(
        self,
        sandbox: Sandbox,
        folders: KernelFolders,
        python: Path,
        environment: Environment | None,
        doors: Mapping[str, SessionSocket] | None = None,
        *,
        has_tools: bool = True,
    ) -> ServicedSandbox:
        """A sandbox with its hatches open: at new doors, or at those that an earlier server opened."""
        return await open_services(
            sandbox,
            folders,
            python=python,
            environment=environment,
            egress=await self._egress(),
            open_uv=self._workshop.uv_for(folders.session_id),
            room=room_for(folders, self._settings),
            toolbox=self._toolbox if has_tools else None,
            importable=(self._skills.importable,) if self._skills is not None and has_tools else (),
            doors=doors,
        )

    async def _egress(self) -> Egress:
        """What the settings let sessions reach; nothing of it where the provider could not hold them to it."""
        if not self._provider.isolates:
            return Egress()
        rules, variables = parse_rules(self._settings.egress), dict[str, str]()
        if PACKAGES in self._settings.egress:
            rules += await self._workshop.index_rules()
            variables = await asyncio.to_thread(index_variables)
        return Egress(rules, self._settings.egress_allow_private, variables)


def thread_count(limits: Limits) -> int:
    """How many threads a session can make use of."""
    available = len(os.sched_getaffinity(0))
    return min(available, math.ceil(limits.cpus)) if limits.cpus else available


def room_for(folders: KernelFolders, settings: Settings) -> InstallRoom:
    """The room for a session's packages, beside all else that its folders hold."""
    own = (folders.workspace, folders.scratch, folders.home, folders.layer)
    return InstallRoom(own, settings.disk_mb or 0)


def limits_of(settings: Settings) -> Limits:
    """What each session may use."""
    return Limits(
        memory_mb=settings.memory_mb or 0,
        cpus=settings.cpus or 0,
        processes=settings.max_processes or 0,
        disk_mb=settings.disk_mb or 0,
        temporary_mb=settings.temporary_mb or 0,
        open_files=settings.max_open_files or 0,
    )
