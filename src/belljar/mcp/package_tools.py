"""Tools that report which packages are installed, and install more."""

import asyncio
from typing import Annotated, Any, cast

from mcp.server.mcpserver import MCPServer
from pydantic import Field, JsonValue

from belljar.engine.contract import Engine
from belljar.engine.models import Installation
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
    current_client,
    last_step,
    refusals_as_results,
    stage_reporter,
)
from belljar.models import Model
from belljar.sessions.registry import Registry

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

    def __init__(self, engine: Engine, sessions: Registry) -> None:
        self._engine = engine
        self._sessions = sessions

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
        """Install packages for a session."""
        check_requirements(packages)  # before a session is made for them
        client, is_made = current_client(), session_id in NO_SESSION
        made_in = (await self._engine.create(client)).session_id if is_made else session_id
        try:
            done = await last_step(self._engine.install(client, made_in, packages), stage_reporter(ctx))
        except BelljarError:
            if is_made:  # for this call, and the caller does not know it
                await self._engine.end(client, made_in)
            raise
        report = PackageReport(session_id=made_in, **dict(cast("Installation", done.installation)))
        outcomes = [InstallOutcome(**cast("dict[str, Any]", fields)) for fields in report.packages]
        lines = [_line(outcome) for outcome in outcomes]
        lines += [f"restart needed: {change}, imported before" for change in report.restart_needed]
        if report.restart_needed:
            lines.append(RESTART)
        if report.pinned:
            lines.append(f"installed: {' '.join(report.pinned)}")
        if is_made:
            lines.append(f"[session_id: {made_in}]")
        answer = model_blocks(report, "\n".join(lines))
        answer.is_error = any(outcome.error or outcome.import_error for outcome in outcomes)
        return answer

    @refusals_as_results
    async def check_installed_packages(
        self,
        packages: Annotated[list[str], Field(min_length=1, max_length=200, description="Such as sklearn, pandas>=2")],
        session_id: Annotated[str, Field(description="Empty for a new one's")] = "",
    ) -> Answer:
        """Whether packages are installed, by distribution or import name."""
        is_chosen, layer, name = session_id not in NO_SESSION, None, self._sessions.settings.environment
        if is_chosen:
            folders, name = self._sessions.folders_and_environment(session_id, current_principal())
            layer = folders.layer
        environment = await self._sessions.starter.environments.for_packages(name)
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
