"""Servers at an address that hang, or are of an earlier time: each is named as what it is, and hides nobody."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from upstream_calls import call, connected, said

from belljar.errors import UpstreamFailed
from belljar.toolbox.server_config import HttpServer, StdioServer
from registry_packages import Unreachable, python_environment
from shared_environment import shared_settings
from waiting import until

pytestmark = pytest.mark.anyio

OLDER = Path(__file__).with_name("older_server.py")
EARLY = Path(__file__).with_name("early_http_server.py")
# What was current when this SDK was.
SDK = ("mcp==1.9.4", "pydantic<2.11", "starlette<0.46", "sse-starlette<2.2", "anyio<4.8", "uvicorn<0.35")
BEGUN = "HTTP/1.1 200 OK\r\ncontent-type: {type}\r\ntransfer-encoding: chunked\r\n\r\n"


class Address:
    """An MCP server over HTTP, by hand: each request is answered in the way that was chosen last."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.url = ""
        self.seen: list[str] = []
        self._session = 0
        self._is_over = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                length = head.partition("content-length: ")[2].partition("\r")[0]
                body = await reader.readexactly(int(length or 0))
                verb = head.split()[0]
                self.seen.append(f"{verb} {json.loads(body).get('method') if body else ''}".strip())
                await self._answer(verb, head, json.loads(body) if body else {}, writer)
        await self._hang_up(writer)

    async def aclose(self) -> None:
        self._is_over.set()
        for writer in [*self._open]:
            await self._hang_up(writer)

    async def _hang_up(self, writer: asyncio.StreamWriter) -> None:
        self._open.discard(writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _answer(self, verb: str, head: str, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if self.how != "works" or verb == "delete":
            started = {"headers": "application/json", "events": "text/event-stream"}.get(self.how)
            writer.write(BEGUN.format(type=started).encode() if started else b"")
            await self._is_over.wait()
            raise ConnectionResetError
        known = f"mcp-session-id: {self._session}\r\n" in head
        match message.get("method"):
            case "initialize":
                self._session += 1
                about = {"name": "by hand", "version": "1"}
                result: dict[str, Any] = {
                    "protocolVersion": "2025-03-26",
                    "capabilities": {"tools": {}},
                    "serverInfo": about,
                }
                self._send(writer, 200, message, result=result)
            case "tools/list" if known:
                tool = {"name": "echo", "inputSchema": {"type": "object"}}
                self._send(writer, 200, message, result={"tools": [tool, {"name": "odd", "inputSchema": 3}]})
            case "tools/call" if known:
                content = [{"type": "text", "text": "called"}, {"type": "hologram"}]
                self._send(writer, 200, message, result={"content": content})
            case "server/discover":
                self._send(writer, 400, message, error={"code": -32600, "message": "what is that?"})
            case _ if "id" in message:
                self._send(writer, 404, message, error={"code": -32600, "message": "no such session"})
            case _:
                writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")

    def _send(self, writer: asyncio.StreamWriter, status: int, message: dict[str, Any], **said: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], **said}).encode()
        head = f"HTTP/1.1 {status} x\r\nmcp-session-id: {self._session}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def forget(self) -> None:
        """As one does that was started again."""
        self._session += 1


@asynccontextmanager
async def address(how: str) -> AsyncGenerator[Address]:
    found = Address(how)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    try:
        yield found
    finally:
        server.close()
        await found.aclose()


async def test_addresses_that_hang_are_named_and_hide_nobody() -> None:
    async with contextlib.AsyncExitStack() as stack:
        found = {
            how: await stack.enter_async_context(address(how)) for how in ("accepts", "headers", "events", "works")
        }
        servers = [HttpServer(how, each.url) for how, each in found.items()]
        async with connected(*servers, wait_s=0.2) as upstreams:
            await until(lambda: not upstreams.catalogue_nowait().servers["works"].is_connecting)
            assert (await call(upstreams, "echo", server="works")).blocks[0].text == "called"
            for how in ("accepts", "headers", "events"):
                with pytest.raises(UpstreamFailed, match=f"{how} is still connecting .*it has not answered yet"):
                    await call(upstreams, "echo", server=how)
            assert [tool.name for tool in upstreams.catalogue_nowait().tools()] == ["echo"]
        async with connected(servers[1], start_s=0.5) as upstreams:
            error = (await upstreams.catalogue()).servers["headers"].error
            assert error == "MCP server headers was not ready within 0.5 s: it has not answered yet"


async def test_one_bad_entry_of_a_list_costs_that_entry_alone_over_http_too() -> None:
    async with address("works") as found, connected(HttpServer("web", found.url)) as upstreams:
        assert [tool.name for tool in (await upstreams.catalogue()).tools()] == ["echo"]
        blocks = (await call(upstreams, "echo", server="web")).blocks
        left_out = "(a block of type 'hologram' is left out: it is not as the protocol has it)"
        assert [block.text for block in blocks] == ["called", left_out]


async def test_one_that_hangs_when_it_is_connected_to_again_keeps_its_tools_and_is_named() -> None:
    async with address("works") as found, connected(HttpServer("web", found.url), start_s=20, wait_s=0.2) as upstreams:
        await upstreams.catalogue()
        found.forget()

        async def hang_then() -> None:
            await until(lambda: found.seen[-1] == "post tools/call")
            found.how = "accepts"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang_then)
            with pytest.raises(UpstreamFailed, match=r"web is still connecting .*it has not answered yet"):
                await call(upstreams, "echo", server="web")
        assert [tool.name for tool in upstreams.catalogue_nowait().tools()] == ["echo"]
        found.how = "works"


async def test_a_process_that_hangs_when_it_is_started_again_keeps_its_tools_and_is_named(tmp_path: Path) -> None:
    arguments = (str(OLDER), "hangs-later", str(tmp_path / "starts"))
    async with connected(StdioServer("later", sys.executable, arguments), start_s=20, wait_s=0.2) as upstreams:
        await upstreams.catalogue()
        with pytest.raises(UpstreamFailed, match="later gave no answer: it ended with status 3"):
            await call(upstreams, "die", server="later")
        with pytest.raises(UpstreamFailed, match="later is still connecting"):
            await call(upstreams, "echo", server="later")
        assert [tool.name for tool in upstreams.catalogue_nowait().tools()] == ["echo"]


async def test_servers_that_hang_do_not_keep_us_from_stopping() -> None:
    async with address("works") as works, address("accepts") as hangs:
        with anyio.fail_after(9):  # in 10 s a connection would be left as it is
            async with connected(HttpServer("works", works.url), HttpServer("hangs", hangs.url)) as upstreams:
                upstreams.catalogue_nowait()
                await call(upstreams, "echo", server="works")
                await until(lambda: bool(hangs.seen))
                works.how = "accepts"


async def test_servers_over_http_of_an_earlier_sdk_are_connected_or_told_what_to_give() -> None:
    with _early("streamable-http") as new, _early("sse") as old:
        addresses = {"new": f"{new}/mcp", "old": f"{old}/sse", "none": f"{old}/nothing"}
        servers = [HttpServer(name, address) for name, address in addresses.items()]
        async with connected(*servers) as upstreams:
            catalogue = await upstreams.catalogue()
            assert catalogue.servers["new"].error == ""
            assert await said(upstreams, "echo", {"text": "hello"}, server="new") == "hello"
            assert catalogue.servers["old"].error == (
                "MCP server old answered with HTTP 405 Method Not Allowed: it may speak SSE, a transport that MCP has "
                "given up; give its streamable HTTP address, which often ends in /mcp"
            )
            assert catalogue.servers["none"].error == (
                "MCP server none answered with HTTP 404 Not Found: there is no MCP server at its address, whose path "
                "often is /mcp"
            )


@contextmanager
def _early(transport: str) -> Generator[str]:
    try:
        environment = python_environment(shared_settings().data_directory / "mcp-servers" / "mcp-1.9.4", *SDK)
    except Unreachable as error:
        pytest.skip(str(error))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(environment / "bin/python"), str(EARLY), transport, str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while "Uvicorn running" not in (line := process.stderr.readline()):
                assert line, "it has ended"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
