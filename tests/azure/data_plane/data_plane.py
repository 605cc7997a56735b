"""The REST data plane as a client calls it."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from calls import served_over_http

from belljar.runtime import Runtime

OLD, NEW = "2024-02-02-preview", "2025-10-02-preview"
KEY = "key-of-ada-0123456789"
OTHER_KEY = "key-of-bob-0123456789"


class Plane:
    """A client of the data plane under one identifier."""

    def __init__(self, client: httpx.AsyncClient, identifier: str, version: str = NEW) -> None:
        self.client = client
        self.identifier = identifier
        self.version = version

    def other(self, identifier: str = "", version: str = NEW) -> "Plane":
        return Plane(self.client, identifier or f"identifier-{secrets.token_hex(8)}", version)

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        query = {"api-version": self.version, "identifier": self.identifier, **options.pop("params", {})}
        return await self.client.request(method, path, params=query, **options)

    async def ok(self, method: str, path: str, **options: Any) -> Any:
        answer = await self.ask(method, path, **options)
        assert answer.status_code in (200, 204), (answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def execute(self, code: str, **fields: Any) -> Any:
        return await self.ok("POST", "/executions", json={"code": code, **fields})

    async def execute_old(self, code: str, **fields: Any) -> Any:
        body = {"codeInputType": "inline", "executionType": "synchronous", "code": code, **fields}
        return (await self.ok("POST", "/code/execute", json={"properties": body}))["properties"]

    async def upload(self, name: str, content: bytes, path: str = "/files", folder: str = "") -> Any:
        query = {"path": folder} if folder else {}
        return await self.ok("POST", path, files={"file": (name, content)}, params=query)


def problem_in(answer: httpx.Response, status: int, code: str, target: str | None = None) -> str:
    """The message of an error in Azure's envelope."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code == answer.headers["x-ms-error-code"]
    assert error.get("target") == target
    assert len(error["traceId"]) == 32
    return error["message"]


@asynccontextmanager
async def opened_plane(runtime: Runtime, key: str = KEY) -> AsyncGenerator[Plane]:
    """A client of a server over this runtime, in this process."""
    async with (
        served_over_http(runtime) as url,
        httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client,
    ):
        yield Plane(client, "identifier-of-ada")
