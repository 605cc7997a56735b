"""Checks a deployment piece by piece, and says which piece is wrong: token, pool, tools, code, project, connection."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
from azure.ai.projects import AIProjectClient
from azure.identity import DefaultAzureCredential

from settings import KitSettings, read_settings

SCOPE = "https://dynamicsessions.io/.default"
ADVICE = {
    401: "the token is not accepted: sign in with `az login` to the tenant of the pool",
    403: "you may not use the pool: deploy again with userPrincipalId, and wait some minutes for the role",
    404: "there is no such pool or path: compare MCP_SERVER_URL with the deployment's output",
    429: "the pool is full: raise maxSessions, or wait for the cooldown",
    502: "the container does not answer: see its log, and that the image was built with SURFACE=foundry",
    503: "no container is ready yet: wait, or raise readySessions",
}

# By the path that Azure's clients use, and by the working directory: both are the session's folder.
WRITE_AND_READ = """
import pathlib
try:
    pathlib.Path("/mnt/data/verify.txt").write_text("kept")
    print(pathlib.Path("verify.txt").read_text())
    pathlib.Path("verify.txt").unlink()
except OSError as error:
    print(error)
"""


class Broken(Exception):
    """A piece that is not in order, and what to do about it."""


class Pool:
    """The MCP endpoint of the pool, as plain JSON-RPC."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"}

    async def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """Return the result of one request."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, **({"params": params} if params is not None else {})}
        async with httpx.AsyncClient(timeout=180) as client:
            try:
                answer = await client.post(self._url, json=body, headers=self._headers)
            except httpx.HTTPError as error:
                raise Broken(f"{urlsplit(self._url).netloc} does not answer ({type(error).__name__})") from error
        if answer.status_code != 200:
            advice = ADVICE.get(answer.status_code, answer.text[:200])
            raise Broken(f"HTTP {answer.status_code}: {advice}")
        content = answer.json()
        if "error" in content:
            raise Broken(f"{method}: {content['error'].get('message')}")
        return content["result"]

    async def run(self, code: str) -> str:
        """Run Python in a new environment and return what it printed."""
        launched = await self.call("tools/call", {"name": "launchShell", "arguments": {}})
        arguments = {"environmentId": launched["structuredContent"]["environmentId"], "pythonCode": code}
        ran = await self.call("tools/call", {"name": "runPythonCodeInRemoteEnvironment", "arguments": arguments})
        return ran["structuredContent"]["stdout"]


async def check_pool(settings: KitSettings, token: str) -> list[tuple[str, Callable[[], Awaitable[str]]]]:
    """Return the checks of the pool, in order."""
    pool = Pool(settings.mcp_url, token)
    parts = urlsplit(settings.mcp_url)
    if "identifier=" not in parts.query:
        raise Broken("MCP_SERVER_URL has no ?identifier=…, by which the platform finds the session")

    async def health() -> str:
        url = urlunsplit(parts._replace(path=parts.path.removesuffix("/mcp") + "/health"))
        async with httpx.AsyncClient(timeout=180) as client:
            answer = await client.get(url, headers={"Authorization": f"Bearer {token}"})
        if answer.status_code != 200:
            raise Broken(f"HTTP {answer.status_code}: {ADVICE.get(answer.status_code, answer.text[:200])}")
        return f"belljar {answer.json()['version']}"

    async def tools() -> str:
        return ", ".join(tool["name"] for tool in (await pool.call("tools/list"))["tools"])

    async def code() -> str:
        printed = await pool.run("import math; print(math.factorial(10))")
        if printed.strip() != "3628800":
            raise Broken(f"10! is told as {printed[:80]!r}")
        return "10! = 3628800"

    async def files() -> str:
        written = await pool.run(WRITE_AND_READ)
        if written.strip() != "kept":
            raise Broken(f"no file can be kept in /mnt/data, the path that Azure's clients write: {written[-200:]!r}")
        return "/mnt/data is the session's folder"

    return [("container", health), ("tools", tools), ("code", code), ("files", files)]


def check_project(settings: KitSettings) -> str:
    """Return the connection's name if the project has it."""
    with AIProjectClient(settings.endpoint, DefaultAzureCredential()) as project:
        names = {connection.id.lower(): connection.name for connection in project.connections.list()}
    wanted = settings.connection_id.lower()
    if wanted not in names:
        raise Broken(f"the project has no such connection, only: {', '.join(names.values()) or 'none'}")
    return names[wanted]


async def verify(settings: KitSettings, token: str = "", *, has_project: bool = True) -> bool:
    """Print a line for each piece; return whether all are in order. Stops at the first that is not."""
    try:
        token = token or await asyncio.to_thread(lambda: DefaultAzureCredential().get_token(SCOPE).token)
        print("ok    token")
        for name, check in await check_pool(settings, token):
            print(f"ok    {name}: {await check()}")
        if has_project:
            print(f"ok    connection: {await asyncio.to_thread(check_project, settings)}")
    except Exception as error:  # noqa: BLE001 - each library has errors of its own, and all of them are told
        print(f"FAIL  {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(verify(read_settings())) else 1)
