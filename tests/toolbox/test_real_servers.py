"""The servers that people use, from npm and PyPI, of both protocol eras side by side."""

import json
import shutil
import subprocess
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp_servers import node_server, python_server
from upstream_calls import call, connected, said, told

from belljar.toolbox.base import Catalogue
from belljar.toolbox.search import ToolIndex
from belljar.toolbox.upstreams import UpstreamConnections

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one commit."""
    git = shutil.which("git") or pytest.skip("there is no git here, which mcp-server-git needs")
    folder = tmp_path_factory.mktemp("served").resolve()
    (folder / "note.txt").write_text("hello")
    author = ["-c", "user.name=Ann", "-c", "user.email=ann@example.com", "-c", "commit.gpgsign=false"]
    for command in (["init", "--quiet"], ["add", "note.txt"], [*author, "commit", "--quiet", "-m", "The first one"]):
        subprocess.run([git, "-C", str(folder), *command], check=True)
    return folder


@pytest.fixture(scope="module")
async def upstreams(folder: Path) -> AsyncGenerator[UpstreamConnections]:
    memory = {"MEMORY_FILE_PATH": str(folder / ".git" / "memory.jsonl")}
    servers = [
        node_server("everything"),
        node_server("filesystem", str(folder)),
        node_server("memory", environment=memory),
        node_server("sequential-thinking"),
        python_server("time", "--local-timezone=UTC"),
        python_server("git", "--repository", str(folder)),
        python_server("sqlite", "--db-path", str(folder / ".git" / "some.db")),
        python_server("fetch", "--ignore-robots-txt", "--allow-private-ips"),
    ]
    async with connected(*servers) as upstreams:
        yield upstreams


@pytest.fixture(scope="module")
async def catalogue(upstreams: UpstreamConnections) -> Catalogue:
    return await upstreams.catalogue()


async def test_all_of_them_are_connected_at_once_with_all_their_tools(catalogue: Catalogue) -> None:
    assert {name: server.error for name, server in catalogue.servers.items() if server.error} == {}
    counts = {name: len(server.tools) for name, server in catalogue.servers.items()}
    assert counts["filesystem"] >= 11
    assert counts["git"] >= 10
    assert counts["sqlite"] == 6
    assert all(counts.values())


async def test_each_of_them_answers(upstreams: UpstreamConnections, folder: Path) -> None:
    assert "hi" in await said(upstreams, "echo", {"message": "hi"}, server="everything")
    assert await said(upstreams, "read_text_file", {"path": str(folder / "note.txt")}, server="filesystem") == "hello"
    person = {"name": "Ann", "entityType": "person", "observations": ["writes"]}
    await call(upstreams, "create_entities", {"entities": [person]}, server="memory")
    assert "writes" in json.dumps((await call(upstreams, "read_graph", server="memory")).structured)
    thought = {"thought": "one", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
    assert not (await call(upstreams, "sequentialthinking", thought, server="sequential-thinking")).is_error
    assert (await told(upstreams, "get_current_time", {"timezone": "UTC"}, server="time"))["timezone"] == "UTC"
    assert "The first one" in await said(upstreams, "git_log", {"repo_path": str(folder)}, server="git")
    await said(upstreams, "create_table", {"query": "create table things (id int)"}, server="sqlite")
    assert "things" in await said(upstreams, "list_tables", server="sqlite")
    with _page(b"<h1>Served here</h1>") as url:
        assert "Served here" in await said(upstreams, "fetch", {"url": url, "raw": True}, server="fetch")


async def test_twenty_reads_at_once_all_answer(upstreams: UpstreamConnections, folder: Path) -> None:
    answers: list[str] = []

    async def read() -> None:
        answers.append(await said(upstreams, "read_text_file", {"path": str(folder / "note.txt")}, server="filesystem"))

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(read)
    assert answers == ["hello"] * 20


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("commit history", "git_log"),
        ("show recent changes", "git_log"),
        ("history of committed changes", "git_log"),
        ("switching branches", "git_checkout"),
        ("create a table", "create_table"),
        ("run sql", "read_query"),
        ("rename a file", "move_file"),
        ("download a web page", "fetch"),
        ("converting between timezones", "convert_time"),
        ("think step by step", "sequentialthinking"),
        ("environment variables", "get-env"),
        ("search files by pattern", "search_files"),
        ("deletes entities", "delete_entities"),
        ("commit my work", "git_commit"),
        ("undo staging", "git_reset"),
        ("show the whole directory structure", "directory_tree"),
        ("read several files at once", "read_multiple_files"),
    ],
)
async def test_words_find_the_tool_that_is_meant(catalogue: Catalogue, query: str, first: str) -> None:
    assert ToolIndex(catalogue).search(query)[0].name == first


@contextmanager
def _page(body: bytes) -> Generator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()
