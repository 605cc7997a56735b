"""What a server tells the others of itself: which one it is, how it is, and whether it would do the same for callers.

Servers pass requests on only to those of the same version, settings and policy, apart from what belongs to a machine.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, Field, SecretStr, StringConstraints, ValidationError

from belljar.distribution import own_version
from belljar.executions.admission import free_memory_mb
from belljar.fleet.assertions import FleetKey
from belljar.runtime import Runtime
from belljar.settings import Settings

OF_A_MACHINE: Final = frozenset(
    {
        "allowed_hosts",
        "container_engine",
        "data_directory",
        "download_directory",
        "env_file",
        "fleet_address",
        "fleet_key",
        "fleet_peers",
        "gpu_contexts",
        "gpus",
        "http",
        "journal_mb",
        "log_format",
        "log_level",
        "max_connections",
        "max_running",
        "max_sessions",
        "max_waiting",
        "memory_headroom_mb",
        "metrics",
        "pool_size",
        "public_url",
        "runsc",
        "servers_directory",
        "sweep_interval_s",
        "tls_certificate",
        "tls_key",
        "workers",
    }
)
"""Settings that may differ between machines of a fleet."""
_MOST_NAMED: Final = 5
OwnState = Literal["ready", "draining", "drained"]
_Tag = Annotated[str, StringConstraints(pattern="^[a-z]{3}$")]
_Short = Annotated[str, StringConstraints(max_length=100)]
_Number = Annotated[int, Field(ge=0, lt=2**53)]


class About(BaseModel, extra="ignore", frozen=True):
    """What a server answers when another one asks how it is."""

    id: _Short
    """Of its data directory, so that it stays when the server starts again, and when it gets another address."""
    tag: _Tag
    """The letters with which its ids begin."""
    name: _Short
    """Of its folder below `runs`, which is another one after each start."""
    state: OwnState
    version: _Short
    digest: _Short = ""
    """Of its settings and its policy."""
    sessions: _Number
    room: _Number
    memory_mb: _Number = 0
    pool: _Number = 0
    ports: Annotated[list[Annotated[int, Field(gt=0, lt=65536)]], Field(max_length=64)] = []
    """At which the servers of its machine answer those of others."""
    silent: Annotated[list[_Tag], Field(max_length=1_000)] = []
    """The letters of those that do not answer it, and that it may give up."""

    @classmethod
    def read(cls, content: bytes) -> "About | None":
        """Return what an answer says; None for one that is none of ours."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return None


def room_of(runtime: Runtime) -> dict[str, int]:
    """Return how many sessions this server has, and how many more it may have."""
    count = len(runtime.sessions.all())
    return {"sessions": count, "room": max(0, runtime.settings.max_sessions - count)}


def about(runtime: Runtime, server: str, state: OwnState, digest: str, ports: list[int], silent: list[str]) -> About:
    """Return what this server tells of itself."""
    return About(
        id=server,
        tag=runtime.sessions.journal.tag,
        name=runtime.name,
        state=state,
        version=own_version(),
        digest=digest,
        memory_mb=free_memory_mb() or 0,
        pool=len(runtime.sessions.pool),
        ports=ports,
        silent=silent,
        **room_of(runtime),
    )


def settings_digests(settings: Settings, key: FleetKey) -> dict[str, str]:
    """Return what compares each setting, and the content of the policy, with those of other machines."""
    values: dict[str, Any] = settings.model_dump(exclude=set(OF_A_MACHINE))
    if settings.policy:
        values["policy"] = Path(settings.policy).read_text(errors="replace")
    return {name: key.digest(f"{name}={json.dumps(value, default=_plain)}") for name, value in values.items()}


def whole_digest(digests: dict[str, str], key: FleetKey) -> str:
    """Return one digest of all."""
    return key.digest(json.dumps(digests, sort_keys=True))


def difference(own: dict[str, str], content: bytes) -> str:
    """Return the names of the settings in which another server differs, as far as its answer names them."""
    try:
        theirs: object = json.loads(content or b"null")
    except ValueError:
        theirs = None
    if not isinstance(theirs, dict):
        return "settings"
    known = cast("dict[str, object]", theirs)
    names = sorted(name for name, digest in own.items() if known.get(name) != digest)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more or "settings"


def _plain(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
