"""A client that follows the rules of the extension `io.modelcontextprotocol/skills` to the letter."""

import base64
import hashlib
from typing import Any

from mcp import Client
from mcp.types import BlobResourceContents, Request, TextResourceContents
from pydantic import TypeAdapter

from belljar.skills.front_matter import parse

ANY = TypeAdapter(dict[str, Any])
MAX_FILES, MAX_BYTES = 512, 16 * 1024 * 1024


async def ask(client: Client, method: str, **params: Any) -> dict[str, Any]:
    """Send a request of the extension; return its result as it came."""
    return await client.session.send_request(Request[dict[str, Any], str](method=method, params=params), ANY)


async def listed(client: Client) -> list[dict[str, Any]]:
    """Page through all skills; each must keep what the extension requires of an entry."""
    skills: list[dict[str, Any]] = []
    cursor: dict[str, Any] = {}
    while True:
        page = await ask(client, "skills/list", **cursor)
        assert page["resultType"] == "complete"
        assert isinstance(page["ttlMs"], int)
        assert page["cacheScope"] in ("public", "private")
        skills += page["skills"]
        if not page.get("nextCursor"):
            break
        cursor = {"cursor": page["nextCursor"]}
    for entry in skills:
        check_entry(entry)
    return skills


def check_entry(entry: dict[str, Any]) -> None:
    path = entry["uri"].removeprefix("skill://").removesuffix("/SKILL.md")
    assert entry["uri"] == f"skill://{path}/SKILL.md"
    assert path.rpartition("/")[2] == entry["frontmatter"]["name"]
    assert entry["frontmatter"]["description"]
    uris = [file["uri"] for file in entry["resources"]]
    assert len(set(uris)) == len(uris) <= MAX_FILES
    assert entry["uri"] in uris
    assert all(uri.startswith(f"skill://{path}/") for uri in uris)
    assert sum(file["size"] for file in entry["resources"]) <= MAX_BYTES


async def content(client: Client, uri: str) -> bytes:
    """The bytes of a file."""
    (read,) = (await client.read_resource(uri, cache_mode="bypass")).contents
    if isinstance(read, TextResourceContents):
        return read.text.encode()
    assert isinstance(read, BlobResourceContents)
    return base64.b64decode(read.blob)


async def accept(client: Client, entry: dict[str, Any]) -> dict[str, bytes]:
    """Load a skill as a host does that verifies everything; return its files."""
    got = await ask(client, "skills/get", uri=entry["uri"])
    assert got["skill"] == entry
    assert got["resultType"] == "complete"
    files: dict[str, bytes] = {}
    for file in entry["resources"]:
        data = await content(client, file["uri"])
        assert len(data) == file["size"], file
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == file["digest"], file
        files[file["uri"]] = data
    assert parse(files[entry["uri"]].decode()).fields == entry["frontmatter"]
    assert {*files} == {*await walked(client, entry["uri"].removesuffix("/SKILL.md"))}
    return files


async def walked(client: Client, uri: str) -> list[str]:
    """Every file below a directory, found by reading directories."""
    found: list[str] = []
    result = await ask(client, "resources/directory/read", uri=uri)
    assert result["resultType"] == "complete"
    for child in result["resources"]:
        is_folder = child["mimeType"] == "inode/directory"
        found += await walked(client, child["uri"]) if is_folder else [child["uri"]]
    return found
