"""Builds the `SandboxSpec` of every session: what its sandbox shows and which limits it has.

Also chooses the services that the host offers in it, and what it may reach. Knows nothing of kernels.
"""

import asyncio
import math
import os
from collections.abc import Mapping
from pathlib import Path

from belljar.egress.rules import PACKAGES, parse_rules
from belljar.egress.session_sockets import SessionSocket
from belljar.environments import Environment
from belljar.environments.package_index import index_variables
from belljar.files.disk_usage import InstallRoom
from belljar.inside import FOLDER
from belljar.provisioning.confined_uv import UvSandbox
from belljar.provisioning.gpus import SessionGpus
from belljar.provisioning.host_folders import HostFolders
from belljar.provisioning.kernel_folders import KernelFolders
from belljar.provisioning.session_services import Egress, ServicedSandbox, open_services
from belljar.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec
from belljar.sandboxes.gpus import GpuView
from belljar.sandboxes.limits.table import LIMITS
from belljar.settings import Settings
from belljar.skills.session_view import ShownSkills
from belljar.toolbox.toolbox import Toolbox


class SpecBuilder:
    """Makes the specs and services of all sandboxes of a provider from the settings, the toolbox and the skills."""

    def __init__(
        self,
        settings: Settings,
        provider: Provider,
        uv_sandbox: UvSandbox,
        gpus: SessionGpus,
        toolbox: Toolbox | None,
        skills: ShownSkills | None = None,
        targets: Path | None = None,
        host_folders: HostFolders | None = None,
    ) -> None:
        self._settings = settings
        self._provider = provider
        self._uv_sandbox = uv_sandbox
        self.gpus = gpus
        self._toolbox = toolbox
        self._skills = skills
        self._targets = targets
        self._host_folders = host_folders or HostFolders(settings)

    def spec(self, folders: KernelFolders, readable: tuple[Path, ...], *, has_tools: bool = True) -> SandboxSpec:
        """Return the spec of a session's sandbox."""
        if has_tools and self._toolbox is not None:
            self._toolbox.tree.show_in(folders.workspace, folders.identity)
            readable = (*readable, *self._toolbox.readable)
        if has_tools and self._skills is not None:
            self._skills.show_in(folders.workspace, folders.identity, folders.skills)
            readable = (*readable, *self._skills.readable, folders.skills)
        if self._targets is not None:
            readable = (*readable, self._targets)
        view = self.gpus.view(folders.session_id, folders.identity) if self.gpus.is_on else GpuView({})
        return SandboxSpec(
            session_id=folders.session_id,
            workspace=folders.workspace,
            scratch=folders.scratch,
            home=folders.home,
            readable=(*readable, *view.readable),
            folders=self._host_folders.of(folders.principal) if self._settings.folders else (),
            limits=limits_of(self._settings),
            identity=folders.identity,
            devices=view.devices,
            keeps_set_ids=True,
        )

    def zygote_spec(self, environment: Environment, name: str, folder: Path) -> SandboxSpec:
        """Return the spec of the sandbox of a zygote, which sessions are forked from."""
        return SandboxSpec(
            session_id=name,
            workspace=folder / "workspace",
            scratch=folder / "scratch",
            home=folder / "home",
            # A nested sandbox can show only what its parent shows.
            readable=(*environment.readable, FOLDER, *self._shown(), *self.gpus.readable()),
            folders=self._host_folders.all(),
            limits=limits_of(self._settings),
            keeps_set_ids=True,
        )

    def _shown(self) -> tuple[Path, ...]:
        shown = [path for each in (self._toolbox, self._skills) if each is not None for path in each.readable]
        return (*shown, *([self._targets] if self._targets is not None else ()))

    async def with_services(
        self,
        sandbox: Sandbox,
        folders: KernelFolders,
        python: Path,
        environment: Environment | None,
        sockets: Mapping[str, SessionSocket] | None = None,
        *,
        has_tools: bool = True,
    ) -> ServicedSandbox:
        """Open the services of a sandbox: on new sockets, or on those that an earlier server opened."""
        serviced = await open_services(
            sandbox,
            folders,
            python=python,
            environment=environment,
            egress=await self._egress(),
            # Asked for when a session first installs something: most never do.
            open_uv=lambda made, folder: self._uv_sandbox.uv_for(folders.session_id)(made, folder),
            room=room_for(folders, self._settings),
            toolbox=self._toolbox if has_tools else None,
            skills=self._skills if has_tools else None,
            targets=self._targets,
            sockets=sockets,
        )
        if self.gpus.is_on and self.gpus.of(folders.session_id):
            view = self.gpus.view(folders.session_id, folders.identity)
            serviced.variables |= view.variables or {}
            serviced.programs = view.programs
        return serviced

    async def _egress(self) -> Egress:
        """Return what the settings let sessions reach; nothing where the provider could not enforce it."""
        if not self._provider.isolates or not self._settings.egress:
            return Egress()
        rules, variables = parse_rules(self._settings.egress), dict[str, str]()
        if PACKAGES in self._settings.egress:
            rules += await self._uv_sandbox.index_rules()
            variables = await asyncio.to_thread(index_variables)
        return Egress(rules, self._settings.egress_allow_private, variables, self._settings.max_upload_bytes)


def thread_count(limits: Limits) -> int:
    """Return how many threads a session can make use of."""
    available = len(os.sched_getaffinity(0))
    return min(available, math.ceil(limits.cpus)) if limits.cpus else available


def room_for(folders: KernelFolders, settings: Settings) -> InstallRoom:
    """Return the disk space that a session's packages may take, which all of its folders count towards."""
    own = (folders.workspace, folders.scratch, folders.home, folders.layer)
    return InstallRoom(own, settings.disk_mb or 0)


def limits_of(settings: Settings) -> Limits:
    """Return what each session may use."""
    return Limits(**{limit.field: getattr(settings, limit.setting) or 0 for limit in LIMITS})
