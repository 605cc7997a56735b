"""One request to the data plane: its address, version, identifier and body, read and bounded."""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast
from urllib.parse import quote, unquote, urlencode

import anyio
from starlette.requests import ClientDisconnect, Request

from belljar.azure.data_plane.problems import Problem, invalid
from belljar.errors import InvalidArgument
from belljar.http.auth import current_principal
from belljar.json_values import TooManyValues, check_values
from belljar.sessions.identified import check_identifier

OLD_VERSIONS: Final = ("2024-02-02-preview", "2024-08-02-preview")
NEW_VERSIONS: Final = ("2024-10-02-preview", "2025-02-02-preview", "2025-10-02-preview")
VERSIONS: Final = (*OLD_VERSIONS, *NEW_VERSIONS)
LARGE_BYTES: Final = 1024 * 1024
_HEADS: Final = ("code", "files", "executions", "session", "listsessions", "metadata", "openapi.json", "mcp")
_POOL: Final = re.compile(r"(?is)(?P<prefix>.*?/sessionPools/+[^/]+)(?P<rest>/.*|)")
_IDENTIFIER: Final = re.compile(r"(?is)(?P<prefix>/+identifier/+(?P<identifier>[^/]+))(?P<rest>/.*|)")


@dataclass(frozen=True, slots=True)
class Address:
    """A path of the data plane, apart from the prefix that the pool has; both as they were sent, with escapes."""

    prefix: str
    identifier: str
    rest: str
    """What follows the prefix, without slashes at its beginning and end."""

    @property
    def head(self) -> str:
        """Return the first part of the rest, in small letters."""
        return self.rest.partition("/")[0].lower()

    def after(self, *parts: str) -> str | None:
        """Return what follows these first parts, unescaped; None if the rest does not begin with them.

        A second slash after the parts stays, because it begins a name like `/mnt/data/x.csv`.
        """
        left = self.rest
        for part in parts:
            left = left.lstrip("/")
            found, slash, left = left.partition("/")
            if found.lower() != part:
                return None
            if not slash:
                left = ""
        return unquote(left, errors="surrogateescape")


def read_address(path: str) -> Address:
    """Split a path that may have the prefix of a pool before it; repeated and final slashes do not matter."""
    prefix, identifier = "", ""
    if path.strip("/").partition("/")[0].lower() not in _HEADS and (found := _POOL.fullmatch(path)):
        prefix, path = found["prefix"], found["rest"]
    if found := _IDENTIFIER.fullmatch(path):
        identifier, path = unquote(found["identifier"]), found["rest"]
        prefix += found["prefix"]
    return Address(prefix, identifier, path.strip("/"))


class Call:
    """One request, with what its address and query say. Raises `Problem` for what they should not say."""

    def __init__(self, request: Request, address: Address) -> None:
        self.request = request
        self.address = address
        self.query = request.query_params

    @cached_property
    def principal(self) -> str:
        """Who is calling."""
        return current_principal()

    @cached_property
    def version(self) -> str:
        """The version of the API that the caller speaks."""
        version = self.query.get("api-version", "")
        if not version:
            raise Problem(
                400,
                "MissingApiVersionParameter",
                f"The query has no api-version. There are {', '.join(VERSIONS)}",
                target="api-version",
            )
        if version not in VERSIONS:
            raise Problem(
                400,
                "InvalidApiVersion",
                f"api-version {version[:64]!r} is not known. There are {', '.join(VERSIONS)}",
                target="api-version",
            )
        return version

    def check_version(self) -> None:
        """Refuse a request whose version is missing or unknown, because it says how everything else is read."""
        _ = self.version

    @property
    def is_old(self) -> bool:
        """Whether the caller speaks a version whose bodies have `properties` around them."""
        return self.version in OLD_VERSIONS

    @cached_property
    def identifier(self) -> str:
        """The name of the caller's session."""
        identifier = self.query.get("identifier") or self.address.identifier
        if not identifier:
            raise invalid("The query has no identifier of a session", "identifier")
        try:
            return check_identifier(identifier)
        except InvalidArgument as error:
            raise invalid(str(error), "identifier") from None

    def url(self, rest: str, **query: str) -> str:
        """Return an absolute URL of this data plane, with the prefix that the caller used."""
        url = self.request.url
        # Only the caller's own answer depends on this header.
        is_secure = url.scheme == "https" or self.request.headers.get("x-forwarded-proto") == "https"
        base = f"{'https' if is_secure else 'http'}://{url.netloc}{self.address.prefix}"
        return f"{base}/{quote(rest)}?{urlencode({'api-version': self.version, **query})}"

    async def body(self, limit_bytes: int) -> dict[str, Any]:
        """Return the JSON object that the request brings."""
        return await self.parse(self.request.stream(), limit_bytes)

    async def parse(self, chunks: AsyncIterator[bytes], limit_bytes: int) -> dict[str, Any]:
        """Return the JSON object that these chunks of the body make."""
        content = await self._content(chunks, limit_bytes)
        try:
            large = len(content) > LARGE_BYTES
            value = await anyio.to_thread.run_sync(_parsed, content) if large else _parsed(content)
        except TooManyValues as error:
            raise invalid(f"The body is refused: {error}", "body") from None
        except (ValueError, RecursionError) as error:
            kind = "nested too deeply" if isinstance(error, RecursionError) else "no JSON"
            raise invalid(f"The body of {len(content):,} bytes is {kind}", "body") from None
        if not isinstance(value, dict):
            raise invalid(f"The body is a JSON {_kind(value)}, and has to be an object", "body")
        return cast("dict[str, Any]", value)

    async def _content(self, chunks: AsyncIterator[bytes], limit_bytes: int) -> bytes:
        try:
            content = await bounded_body(self.request, chunks, limit_bytes)
        except ClientDisconnect:
            raise caller_gone() from None
        if content is None:
            raise Problem(413, "RequestTooLarge", f"The body has more than {limit_bytes:,} bytes", target="body")
        return content


async def bounded_body(request: Request, chunks: AsyncIterator[bytes], limit_bytes: int) -> bytes | None:
    """Return what chunks of a body make together; None where that is too long."""
    content = bytearray()
    if length_of(request) > limit_bytes:
        return None
    async for chunk in chunks:
        content += chunk
        if len(content) > limit_bytes:
            return None
    return bytes(content)


def length_of(request: Request) -> int:
    """Return the announced size of the body; 0 where none is announced."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 19 else 0


def caller_gone() -> Problem:
    """Return the problem of a caller who went away, who will not read it."""
    return invalid("The body ended before its announced end", "body")


def _parsed(content: bytes) -> object:
    check_values(content)
    return json.loads(content)


def _kind(value: object) -> str:
    kinds = {"list": "array", "str": "string", "bool": "boolean", "NoneType": "null"}
    return kinds.get(type(value).__name__, "number")


# Fields of bodies


def word(fields: dict[str, Any], name: str, default: str, allowed: dict[str, str], *, within: str = "") -> str:
    """Return a field that takes one of some words, in any case, as the word that stands for it."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or value.lower() not in allowed:
        raise invalid(f"{name} takes {', '.join(allowed.values())}", within + name)
    return allowed[value.lower()]


def text(fields: dict[str, Any], name: str, *, within: str = "") -> str:
    """Return a field that has to be there and be text."""
    value = fields.get(name)
    if not isinstance(value, str):
        missing = "is missing" if value is None else "is no text"
        raise invalid(f"{name} {missing}", within + name)
    return value


def number(fields: dict[str, Any], name: str, *, within: str = "") -> float | None:
    """Return a field that has to be a number above 0, if it is there."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise invalid(f"{name} has to be a number above 0", within + name)
    return float(value) if value < 1e15 else 1e15
