"""A stand-in for a Foundry project: keeps agents, and answers as a model would that runs Python by the agent's tool.

What it does with the tool is real: it connects to the server that the agent names, as the platform does, lists its
tools and runs code there. It speaks TLS, because Azure's clients send their tokens over nothing else.
"""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from certificates import make_certificate

PROJECT = "/api/projects/test"
CODE = "import math\nprint(math.factorial(10))"


@dataclass
class AgentsEndpoint:
    """The project; `calls` are the requests that it got, `tokens` what they carried."""

    key: str
    connection_id: str
    url: str = ""
    agents: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    calls: list[str] = field(default_factory=list[str])
    tokens: set[str] = field(default_factory=set[str])
    tools: list[str] = field(default_factory=list[str])

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route(f"{PROJECT}/agents/{{name}}/versions", self.create, methods=["POST"]),
                Route(f"{PROJECT}/agents/{{name}}/versions/{{version}}", self.delete, methods=["DELETE"]),
                Route(f"{PROJECT}/openai/v1/responses", self.respond, methods=["POST"]),
                Route(f"{PROJECT}/connections", self.connections, methods=["GET"]),
            ]
        )

    def _note(self, request: Request) -> None:
        self.calls.append(f"{request.method} {request.url.path.removeprefix(PROJECT)}")
        self.tokens.add(request.headers.get("authorization", ""))

    async def create(self, request: Request) -> Response:
        self._note(request)
        name, definition = request.path_params["name"], (await request.json())["definition"]
        self.agents[name] = definition
        return JSONResponse(
            {
                "object": "agent.version",
                "id": f"{name}:1",
                "name": name,
                "version": "1",
                "created_at": 1,
                "metadata": {},
                "definition": definition,
            }
        )

    async def delete(self, request: Request) -> Response:
        self._note(request)
        name, version = request.path_params["name"], request.path_params["version"]
        del self.agents[name]
        return JSONResponse({"object": "agent.version.deleted", "name": name, "version": version, "deleted": True})

    async def connections(self, request: Request) -> Response:
        self._note(request)
        entry = {
            "name": "belljar-interpreter",
            "id": self.connection_id,
            "type": "RemoteTool",
            "target": "",
            "isDefault": False,
        }
        return JSONResponse({"value": [{**entry, "credentials": {"type": "None"}, "metadata": {}}]})

    async def respond(self, request: Request) -> Response:
        self._note(request)
        reference = (await request.json())["agent_reference"]
        (tool,) = self.agents[reference["name"]]["tools"]
        assert (tool["type"], tool["project_connection_id"]) == ("mcp", self.connection_id)
        printed = await self._run(tool["server_url"])
        text = {"type": "output_text", "text": f"The factorial of 10 is {int(printed):,}.", "annotations": []}
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        return JSONResponse(
            {
                "id": "r",
                "object": "response",
                "created_at": 1,
                "model": "scripted",
                "output": [message],
                "parallel_tool_calls": False,
                "tool_choice": "auto",
                "tools": [],
            }
        )

    async def _run(self, url: str) -> str:
        """Run code by the tools of the agent's server, with the credentials of the project's connection."""
        async with (
            httpx_client(self.key) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            self.tools = sorted(tool.name for tool in (await client.list_tools()).tools)
            launched = await client.call_tool("launchShell", {})
            assert launched.structured_content is not None
            environment = launched.structured_content["environmentId"]
            ran = await client.call_tool(
                "runPythonCodeInRemoteEnvironment", {"environmentId": environment, "pythonCode": CODE}
            )
            assert ran.structured_content is not None, ran
            return ran.structured_content["stdout"]


def httpx_client(key: str) -> Any:
    import httpx2

    return httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60)


@contextmanager
def served(endpoint: AgentsEndpoint, folder: Path) -> Generator[Path]:
    """Serve it at a free port of this machine; yields the file of the authority that vouches for it."""
    files = make_certificate(folder)
    config = uvicorn.Config(
        endpoint.app(), host="127.0.0.1", port=0, log_config=None, ssl_certfile=files.certificate, ssl_keyfile=files.key
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        _until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        endpoint.url = f"https://localhost:{port}{PROJECT}"
        yield files.certificate
    finally:
        server.should_exit = True
        thread.join()


def _until(look: Any) -> None:
    from waiting import until_blocking

    until_blocking(look)
