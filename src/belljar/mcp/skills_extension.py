"""The protocol's extension `io.modelcontextprotocol/skills` (SEP-2640): skills listed with digests of all their files.

The files themselves are resources; see `skill_tools.py`. Clients of 2025-11-25 are answered too, although the SDK
does not tell them of extensions.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Literal
from urllib.parse import quote, unquote

from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.types import INVALID_PARAMS, CacheableResult, PaginatedRequestParams, PaginatedResult, RequestParams, Resource
from pydantic import BaseModel, Field

from belljar.files.file_types import mime_type_of
from belljar.http.auth import current_principal
from belljar.skills.format import MAIN
from belljar.skills.library import SCHEME, Skill, SkillLibrary

IDENTIFIER: Final = "io.modelcontextprotocol/skills"
TTL_MS: Final = 10_000
"""How long clients may take a listing for current; the operator's folder may change at any time."""
PAGE: Final = 100
DIRECTORY: Final = "inode/directory"
_URI_CHARS: Final = 4_096


class SkillResource(BaseModel):
    """A file of a skill, with the digest of its bytes."""

    uri: str
    digest: str
    size: int


class SkillEntry(BaseModel):
    """A skill as clients list and verify it."""

    uri: str
    frontmatter: dict[str, Any]
    resources: list[SkillResource]


class ListSkillsResult(PaginatedResult, CacheableResult):
    """Answer of `skills/list`."""

    result_type: Literal["complete"] = "complete"
    skills: list[SkillEntry]


class GetSkillParams(RequestParams):
    """Parameters of `skills/get`."""

    uri: str = Field(max_length=_URI_CHARS)


class GetSkillResult(CacheableResult):
    """Answer of `skills/get`."""

    result_type: Literal["complete"] = "complete"
    skill: SkillEntry


class ReadDirectoryParams(PaginatedRequestParams):
    """Parameters of `resources/directory/read`."""

    uri: str = Field(max_length=_URI_CHARS)


class ReadDirectoryResult(PaginatedResult):
    """Answer of `resources/directory/read`."""

    result_type: Literal["complete"] = "complete"
    resources: list[Resource]


Ctx = ServerRequestContext[Any, Any]


class SkillsExtension(Extension):
    """Serves the skills of one library, to each caller its own."""

    identifier = IDENTIFIER

    def __init__(self, library: SkillLibrary) -> None:
        self._library = library

    def settings(self) -> dict[str, Any]:
        """See `Extension`."""
        return {"directoryRead": True}

    def methods(self) -> Sequence[MethodBinding]:
        """See `Extension`."""
        return (
            MethodBinding("skills/list", PaginatedRequestParams, self._list),
            MethodBinding("skills/get", GetSkillParams, self._get),
            MethodBinding("resources/directory/read", ReadDirectoryParams, self._read_directory),
        )

    async def _list(self, ctx: Ctx, params: PaginatedRequestParams | None) -> ListSkillsResult:
        skills = await self._skills()
        start = _start(params.cursor if params else None, len(skills))
        page = skills[start : start + PAGE]
        return ListSkillsResult(
            skills=[_entry(skill) for skill in page],
            next_cursor=str(start + PAGE) if start + PAGE < len(skills) else None,
            ttl_ms=TTL_MS,
            cache_scope=_scope(page) if self._library.store is None else "private",
        )

    async def _get(self, ctx: Ctx, params: GetSkillParams) -> GetSkillResult:
        path = unquote(params.uri).removeprefix(SCHEME)
        skill = await asyncio.to_thread(self._library.find, current_principal(), path)
        if skill is None or skill.uri != params.uri:
            raise MCPError(INVALID_PARAMS, f"No skill is served at {params.uri[:200]}")
        return GetSkillResult(skill=_entry(skill), ttl_ms=TTL_MS, cache_scope=_scope([skill]))

    async def _read_directory(self, ctx: Ctx, params: ReadDirectoryParams) -> ReadDirectoryResult:
        path = unquote(params.uri.removeprefix(SCHEME))
        skill = await asyncio.to_thread(self._library.find, current_principal(), path)
        is_ours = skill is not None and params.uri.startswith(SCHEME)
        children = _children(skill, path, params.uri) if skill is not None and is_ours else None
        if children is None:
            raise MCPError(INVALID_PARAMS, f"{params.uri[:200]} is not a directory resource")
        start = _start(params.cursor, len(children))
        page = children[start : start + PAGE]
        return ReadDirectoryResult(
            resources=page, next_cursor=str(start + PAGE) if start + PAGE < len(children) else None
        )

    async def _skills(self) -> list[Skill]:
        skills = await asyncio.to_thread(self._library.skills, current_principal())
        return [skill for skill in skills if not skill.is_plain]


def _entry(skill: Skill) -> SkillEntry:
    files = [SkillResource(uri=skill.resource(file.path), digest=file.digest, size=file.size) for file in skill.files]
    return SkillEntry(uri=skill.uri, frontmatter=skill.fields, resources=files)


def _scope(skills: Sequence[Skill]) -> Literal["public", "private"]:
    return "private" if any(skill.version is not None for skill in skills) else "public"


def _start(cursor: str | None, count: int) -> int:
    if cursor is None:
        return 0
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 9 or int(cursor) > count:
        raise MCPError(INVALID_PARAMS, f"Unknown cursor: {cursor[:80]!r}")
    return int(cursor)


def _children(skill: Skill, path: str, uri: str) -> list[Resource] | None:
    """Return the direct children of a directory within a skill; None for what is no such directory."""
    prefix = f"{path}/"
    found: dict[str, Resource] = {}
    for file in skill.files:
        whole = f"{skill.path}/{file.path}"
        if not whole.startswith(prefix):
            continue
        name, _, below = whole.removeprefix(prefix).partition("/")
        child = f"{uri}/{quote(name)}"
        if below:
            found.setdefault(name, Resource(uri=child, name=name, mime_type=DIRECTORY))
        elif whole == f"{skill.path}/{MAIN}":
            found[name] = Resource(
                uri=child, name=skill.name, description=skill.description, mime_type="text/markdown", size=file.size
            )
        else:
            found[name] = Resource(uri=child, name=name, mime_type=mime_type_of(name), size=file.size)
    return [found[name] for name in sorted(found)] or None
