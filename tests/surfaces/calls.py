"""The interpreter surface as a client calls it, with answers as models."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
import under_test
from mcp import Client
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    ImageContent,
    Implementation,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from belljar.environments import Environment
from belljar.http.app import serve_http
from belljar.mcp.server import BelljarServer, build_http_app, build_server
from belljar.models import ExecutionResult
from belljar.runtime import Runtime
from belljar.settings import Settings
from belljar.settings.sources import ALIASES

LEGACY, MODERN = "legacy", "2026-07-28"
NAMED = Implementation(name="some-agent", version="1")
"""A client that says which one it is; those that do not are sent less beside the text."""
ERAS = [LEGACY, MODERN]
# A cell that says where it is and then goes on only when the test lets it.
HELD = "import os, time\nprint('held', flush=True)\nwhile not os.path.exists({name!r}): time.sleep(0.005)\n"
# For an engine in which the tests of a file start many sessions: a fork takes a tenth of the time of a cold start.
FORKS: dict[str, Any] = {"fork_start": True, "pool_size": 0}
Block = TypeVar("Block", bound=ContentBlock)


def held(name: str = "go") -> str:
    return HELD.format(name=name)


def settings_for(environment: Environment, folder: Path, **chosen: Any) -> Settings:
    """Settings that nothing on the developer's machine has a say in."""
    with pytest.MonkeyPatch.context() as patch:
        own = (f"BELLJAR_{name.upper()}" for name in Settings.model_fields)
        for name in ("BELLJAR_CONFIG", *ALIASES.values(), *own):
            patch.delenv(name, raising=False)
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        patch.chdir(folder)
        values: dict[str, Any] = {
            "data_directory": folder,
            "download_directory": folder / "downloads",
            "log_level": "ERROR",
            # Both take time at the start or the end of an engine: tests that are about them ask for them.
            "fork_start": False,
            "hibernate": False,
            # The usual modules take two seconds of a processor in every engine that forks.
            "preload": [],
            **chosen,
        }
        return Settings(environment=str(environment.python), **values)


@asynccontextmanager
async def opened_runtime(environment: Environment, folder: Path, **chosen: Any) -> AsyncGenerator[Runtime]:
    async with under_test.opened(settings_for(environment, folder, **chosen)) as runtime:
        yield runtime


class Caller:
    """One connected client."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> CallToolResult:
        return await self.client.call_tool(tool, arguments)

    async def whole(self, tool: str, **arguments: Any) -> CallToolResult:
        """The answer with every field of a result, as a program asks for it."""
        return await self.client.call_tool(tool, arguments, meta={"belljar/structured": "always"})

    async def fields(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer of a tool that must not refuse."""
        answer = await self.call(tool, **arguments)
        assert not answer.is_error, text_of(answer)
        assert answer.structured_content is not None
        return answer.structured_content

    async def refusal(self, tool: str, **arguments: Any) -> str:
        """What a tool says that must refuse."""
        answer = await self.call(tool, **arguments)
        assert answer.is_error, text_of(answer)
        return text_of(answer)

    async def execute(self, code: str, session_id: str = "", **arguments: Any) -> ExecutionResult:
        return await self._result("execute_code", code=code, session_id=session_id, **arguments)

    async def get(self, execution_id: str, **arguments: Any) -> ExecutionResult:
        return await self._result("get_execution", execution_id=execution_id, **arguments)

    async def ended(self, execution_id: str) -> ExecutionResult:
        """The result of an execution that was left running."""
        result = await self.get(execution_id, wait_s=60)
        assert result.status != "running"
        return result

    async def _result(self, tool: str, **arguments: Any) -> ExecutionResult:
        answer = await self.whole(tool, **arguments)
        result = ExecutionResult.model_validate(answer.structured_content)
        assert answer.is_error == (not result.success)
        return result

    async def new_session(self) -> str:
        return (await self.fields("new_session"))["session_id"]

    async def release(self, session_id: str, name: str = "go") -> None:
        """Let a held cell go on."""
        await self.fields("upload_file", session_id=session_id, name=name, text="")

    async def read(self, uri: str) -> TextResourceContents | BlobResourceContents:
        """The one content of a resource."""
        (content,) = (await self.client.read_resource(uri, cache_mode="bypass")).contents
        return content

    async def read_text(self, uri: str) -> str:
        content = await self.read(uri)
        assert isinstance(content, TextResourceContents)
        return content.text


_built: list[tuple[Runtime, BelljarServer]] = []


def built_server(runtime: Runtime) -> BelljarServer:
    """The server over this runtime, the same for one client after the other: making one takes 40 ms of every test."""
    if not _built or _built[0][0] is not runtime:
        _built[:] = [(runtime, build_server(runtime, ["interpreter"]))]
    return _built[0][1]


@asynccontextmanager
async def connected(runtime: Runtime, era: str = MODERN, **options: Any) -> AsyncGenerator[Caller]:
    """A client of the server over this runtime: in memory, or of the server in front of it."""
    chosen: dict[str, Any] = {"client_info": NAMED, **options}
    front = under_test.fronts.get(runtime.name)
    async with Client(f"{front}/mcp" if front else built_server(runtime), mode=era, **chosen) as client:
        yield Caller(client)


@asynccontextmanager
async def served_over_http(runtime: Runtime) -> AsyncGenerator[str]:
    """The URL of a server over this runtime, in this process: starting another one takes seconds."""
    urls, ready = list[str](), anyio.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(serve_http, build_http_app(runtime), "127.0.0.1", 0, on_ready=on_ready))
        await ready.wait()
        yield urls[0]
        tasks.cancel_scope.cancel()


async def until_said(runtime: Runtime, execution_id: str, text: str) -> None:
    """Until a running cell has printed something."""
    execution = runtime.sessions.executions.find(execution_id, "local")
    assert execution is not None
    with anyio.fail_after(60):
        while text not in "".join(execution.result().output):
            assert not execution.is_finished, execution.result()
            await execution.wait_for_change(60)


def blocks(answer: CallToolResult, kind: type[Block]) -> list[Block]:
    return [block for block in answer.content if isinstance(block, kind)]


def text_of(answer: CallToolResult) -> str:
    (text,) = blocks(answer, TextContent)
    return text.text


def images(answer: CallToolResult) -> list[ImageContent]:
    return blocks(answer, ImageContent)


def links(answer: CallToolResult) -> list[ResourceLink]:
    return blocks(answer, ResourceLink)


def session_in(answer: CallToolResult) -> str:
    """The session id as a model reads it, from the text."""
    found = re.search(r"session_id: ([a-z]{17})", text_of(answer))
    assert found is not None
    return found[1]
