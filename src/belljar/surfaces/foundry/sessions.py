"""Sessions of the data plane: what there is to know of one, their list, their end, and what the pool offers."""

import asyncio
import hashlib
from datetime import UTC, datetime
from typing import Any, Final

from starlette.responses import Response

from belljar.environments.base import Environment
from belljar.environments.description import describe_packages
from belljar.environments.selection import KERNEL_PREFIX
from belljar.journal.session_records import SessionRecord, iso_ms
from belljar.runtime import Runtime
from belljar.sessions.closer import DAY_S
from belljar.sessions.identified import IdentifiedSessions
from belljar.surfaces.foundry.calls import Call
from belljar.surfaces.foundry.problems import invalid, json_response

LISTED: Final = 100


class SessionRoutes:
    """The routes about sessions as a whole, over one runtime."""

    def __init__(self, runtime: Runtime, identified: IdentifiedSessions) -> None:
        self._runtime = runtime
        self._sessions = runtime.sessions
        self._identified = identified
        self._started_at = datetime.now(UTC).timestamp()
        self._described: dict[str, Any] | None = None

    async def show(self, call: Call) -> Response:
        """Answer `GET /session`."""
        entry = self._identified.known(call.identifier, call.principal)
        return json_response(self._fields(call.identifier, entry))

    async def remove(self, call: Call) -> Response:
        """Answer `DELETE /session`, which succeeds also where there is none."""
        await self._identified.clear(call.identifier, call.principal)
        return Response(status_code=204)

    async def list(self, call: Call) -> Response:
        """Answer `GET /listSessions`."""
        skip = call.query.get("skip", "0")
        if not skip.isascii() or not skip.isdigit() or len(skip) > 9:
            raise invalid("skip has to be a whole number from 0 on", "skip")
        found = self._identified.records.of(call.principal, after=int(skip), count=LISTED + 1)
        entries = [(each.identifier, self._sessions.records.find(each.session_id)) for each in found[:LISTED]]
        link = call.url("listSessions", skip=str(int(skip) + LISTED)) if len(found) > LISTED else None
        sessions = [self._fields(identifier, entry) for identifier, entry in entries if entry is not None]
        return json_response({"sessions": sessions, "nextLink": link})

    async def metadata(self, call: Call) -> Response:
        """Answer `GET /metadata`: what code finds in every session."""
        if self._described is None:
            self._described = await self._describe()
        times = {"createdAt": iso_ms(self._started_at), "lastUpdatedAt": iso_ms(self._started_at)}
        return json_response({**self._described, **times})

    def _fields(self, identifier: str, entry: SessionRecord) -> dict[str, Any]:
        live = next((each for each in self._sessions.of(entry.principal) if each.id == entry.id), None)
        used_at = live.lease.used_at if live else entry.used_at
        expires_at = live.lease.expires_at if live else entry.used_at + self._runtime.settings.keep_days * DAY_S
        return {
            "identifier": identifier,
            "createdAt": iso_ms(live.lease.created_at if live else entry.created_at),
            "lastAccessedAt": iso_ms(used_at),
            "expireAt": iso_ms(expires_at),
            "etag": hashlib.sha256(entry.id.encode()).hexdigest()[:32],
        }

    async def _describe(self) -> dict[str, Any]:
        name = self._runtime.settings.environment
        if name.startswith(KERNEL_PREFIX):
            kernel = name.removeprefix(KERNEL_PREFIX)
            return {"runtimes": [], "preInstalledPackages": [], "jupyterKernel": kernel}
        environment: Environment = await self._runtime.starter.environments.get(name)
        description = await asyncio.to_thread(describe_packages, environment)
        packages = [{"name": package, "version": version} for package, version in description.packages.items()]
        return {
            "runtimes": [{"name": "python", "version": description.version}],
            "preInstalledPackages": packages,
            "jupyterKernel": "python3",
        }
