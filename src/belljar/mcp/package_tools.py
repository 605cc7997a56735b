"""Tools that report which packages are installed, and install more."""

import asyncio
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from pydantic import Field, JsonValue

from belljar.environments.installed_check import PackageStatus, check_installed
from belljar.environments.installs import InstallOutcome, as_fields, check_requirements
from belljar.errors import BelljarError
from belljar.http.auth import current_principal
from belljar.mcp.content import model_blocks
from belljar.mcp.tools import (
    NO_SESSION,
    READS,
    REPLACES,
    Answer,
    Ctx,
    OptionalSession,
    add_tools,
    find_or_create_session,
    refusals_as_results,
    stage_reporter,
)
from belljar.models import Model
from belljar.provisioning.starter import KernelStarter
from belljar.sessions.packages import install_packages
from belljar.sessions.registry import Registry
from belljar.settings import Settings

RESTART = "`import os; os._exit(0)` restarts the session's Python: files and packages stay, variables are lost."
"""What a model can do about a package that was imported before it changed; there is no kernel that it could restart."""


class PackageReport(Model):
    """Answer of the package tools."""

    session_id: str | None = None
    packages: list[dict[str, JsonValue]]
    restart_needed: list[str] = Field(default=[])
    pinned: list[str] = Field(default=[])


class PackageTools:
    """The package tools, over the default environment and the caller's sessions."""

    def __init__(self, starter: KernelStarter, sessions: Registry, settings: Settings) -> None:
        self._starter = starter
        self._sessions = sessions
        self._settings = settings

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools to a server."""
        add_tools(server, (self.install_dependencies, REPLACES), (self.check_installed_packages, READS))

    @refusals_as_results
    async def install_dependencies(
        self,
        ctx: Ctx,
        packages: Annotated[list[str], Field(min_length=1, max_length=100, description="Such as pandas>=2")],
        session_id: OptionalSession = "",
    ) -> Answer:
        """Install packages for a session; tells each one's version, or why not."""
        check_requirements(packages)  # before a session is made for them
        session = await find_or_create_session(self._sessions, session_id)
        try:
            with session.in_use():
                installation = await install_packages(self._starter, session, packages, on_stage=stage_reporter(ctx))
        except BelljarError:
            if session.id != session_id:  # made for this call, and the caller does not know it
                await self._sessions.clear(session.id, session.principal)
            raise
        lines = [_line(outcome) for outcome in installation.outcomes]
        lines += [f"restart needed: {change}, imported before" for change in installation.restart_needed]
        if installation.restart_needed:
            lines.append(RESTART)
        if installation.pinned:
            lines.append(f"installed: {' '.join(installation.pinned)}")
        report = PackageReport(
            session_id=session.id,
            packages=[as_fields(outcome) for outcome in installation.outcomes],
            restart_needed=installation.restart_needed,
            pinned=installation.pinned,
        )
        if session_id in NO_SESSION:
            lines.append(f"[session_id: {session.id}]")
        answer = model_blocks(report, "\n".join(lines))
        answer.is_error = any(outcome.error or outcome.import_error for outcome in installation.outcomes)
        return answer

    @refusals_as_results
    async def check_installed_packages(
        self,
        packages: Annotated[list[str], Field(min_length=1, max_length=200, description="Such as sklearn, pandas>=2")],
        session_id: Annotated[str, Field(description="Empty for a new one's")] = "",
    ) -> Answer:
        """Whether packages are installed, by distribution or import name; imports nothing."""
        is_chosen, layer, name = session_id not in NO_SESSION, None, self._settings.environment
        if is_chosen:
            folders, name = self._sessions.folders_and_environment(session_id, current_principal())
            layer = folders.layer
        environment = await self._starter.environments.for_packages(name)
        statuses = await asyncio.to_thread(check_installed, environment, layer, packages)
        report = PackageReport(
            session_id=session_id if is_chosen else None, packages=[as_fields(status) for status in statuses]
        )
        return model_blocks(report, "\n".join(map(_status_line, statuses)))


def _status_line(status: PackageStatus) -> str:
    found = (status.version or "there") if status.installed else "not installed"
    return f"{status.name}: {found}{f' ({status.note})' if status.note else ''}"


def _line(outcome: InstallOutcome) -> str:
    if outcome.error is not None:
        return f"{outcome.name}: {outcome.error}"
    if outcome.import_error is not None:
        return f"{outcome.name} {outcome.installed_version}, but it does not import: {outcome.import_error}"
    origin = {"conda": ", from conda", "pypi": ", a wheel"}.get(outcome.source, "")
    note = f" ({outcome.note})" if outcome.note else ""
    return f"{outcome.name} {outcome.installed_version}{', imports' if outcome.imported else ''}{origin}{note}"
