"""Reads the policy's decision log for monitors. The log has pseudonyms in place of owners."""

import json
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from belljar.logs import pseudonym
from belljar.monitor.base import Access
from belljar.policy.decision_log import FILE

_MAX_BYTES = 4 * 1024 * 1024


def read_decisions(
    data_directory: Path, access: Access, execution_id: str = "", limit: int = 50
) -> list[dict[str, JsonValue]]:
    """Return decisions that somebody may see, newest first, all or those of an execution."""
    own = pseudonym(access.principal)
    found: list[dict[str, JsonValue]] = []
    for line in reversed(_last_lines(data_directory / FILE)):
        entry = _decision(line)
        is_visible = access.is_operator or own in (entry.get("principal"), entry.get("owner"))
        if entry and is_visible and (not execution_id or execution_id in entry.values()):
            found.append(entry)
        if len(found) == limit:
            break
    return found


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size > _MAX_BYTES else lines


def _decision(line: bytes) -> dict[str, JsonValue]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return cast("dict[str, JsonValue]", entry) if isinstance(entry, dict) else {}
