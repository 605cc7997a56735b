"""The first hour of a user: a server without an environment, up to its first result; and what a model reads of results.

The server has an empty data directory and an empty cache of uv. What is fetched is counted by a proxy that uv goes
through. Results are twenty typical cells: our text beside everything that ipykernel sends about the same cell.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from bench.figures import Figure
from bench.ipykernels import open_ipykernel
from bench.servers import belljar_command, open_stdio
from bench.stage import Stage
from bench.tokens import count_tokens

NAME = "first-hour"
TARGET = 0.5
_TIMEOUT_S = 200.0
_LINE_BYTES = 16 * 1024 * 1024
_FRAME = """import pandas as pd, numpy as np
df = pd.DataFrame({'city': list('abcdefgh'), 'n': range(8), 'x': np.linspace(0, 1, 8)})"""
# A cell, and what a model must be able to read of its result.
CELLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("1 + 1", ("2",)),
    ("print('hello')", ("hello",)),
    (_FRAME, ()),
    ("df", ("city", "0.142857")),
    ("df.describe()", ("mean", "3.5", "75%")),
    ("df.groupby('city').n.sum()", ("city", "h    7")),
    ("df.to_dict('records')[:2]", ("'city': 'a'",)),
    ("for i in range(20): print(i, i * i)", ("19 361",)),
    ("1 / 0", ("ZeroDivisionError: division by zero",)),
    ("df['missing']", ("KeyError", "missing")),
    ("def f(n): return g(n)\ndef g(n): return {}[n]\nf(3)", ("KeyError: 3", "g(n)")),
    ("import nowhere_at_all", ("ModuleNotFoundError", "nowhere_at_all")),
    ("open('none.csv')", ("FileNotFoundError", "none.csv")),
    ("x = = 1", ("SyntaxError", "x = = 1")),
    ("import numpy as np; np.arange(12).reshape(3, 4)", ("[ 8,  9, 10, 11]",)),
    ("import sympy; y = sympy.symbols('y'); sympy.integrate(y**2, y)", ("y**3/3",)),
    ("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.title('t')", ()),
    ("import sys; print('careful', file=sys.stderr); 'done'", ("careful", "done")),
    ("import json; print(json.dumps({'a': [1, 2, {'b': None}]}, indent=1))", ('"b": null',)),
    ("from sklearn.linear_model import LinearRegression as L; L().fit(df[['n']], df.x)", ("LinearRegression",)),
)


async def measure(stage: Stage) -> list[Figure]:
    """The times of one server that has nothing, then the tokens."""
    return [*await _from_nothing(), *await _tokens(stage)]


# From nothing


async def _from_nothing() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="belljar-first-hour-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        async with _counting_proxy() as (port, count):
            has_upstream = any(os.environ.get(each) for each in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"))
            proxy = {} if has_upstream else {"HTTPS_PROXY": f"http://127.0.0.1:{port}"}
            taken = await _first_call(folder, proxy)
            fetched = count.received / 1e6
    note = "no environment, no cache" + ("" if not has_upstream else "; behind a proxy, so nothing is counted")
    return [
        Figure(NAME, "spawn → initialize", "s", taken.initialized, note=note),
        Figure(NAME, "spawn → first progress", "s", taken.progress, note=taken.said[:60]),
        Figure(
            NAME, "spawn → first result", "s", taken.result, note=f"{taken.calls} calls, {taken.lines} progress lines"
        ),
        Figure(NAME, "fetched", "MB", fetched),
    ]


@dataclass(slots=True)
class _FirstCall:
    initialized: float = 0.0
    progress: float = 0.0
    result: float = 0.0
    said: str = ""
    lines: int = 0
    calls: int = 0


async def _first_call(folder: Path, proxy: dict[str, str]) -> _FirstCall:
    """Start a server as a client does, and call `execute_code`, then `get_execution` until the cell has run."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("BELLJAR_")}
    own = {"BELLJAR_DATA_DIRECTORY": str(folder / "data"), "UV_CACHE_DIR": str(folder / "cache")}
    (folder / "data").mkdir(0o711)
    began, taken = time.perf_counter(), _FirstCall()
    process = await asyncio.create_subprocess_exec(
        *belljar_command(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**variables, **own, **proxy},
        limit=_LINE_BYTES,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await _send(process, "initialize", 0, _HELLO)
            await _answer(process, 0, taken, began)
            taken.initialized = time.perf_counter() - began
            await _send(process, "notifications/initialized", None, {})
            tool, arguments = "execute_code", {"code": "1 + 1"}
            while True:
                taken.calls += 1
                params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": "p"}}
                await _send(process, "tools/call", taken.calls, params)
                fields = (await _answer(process, taken.calls, taken, began))["result"]["structuredContent"]
                if fields["status"] != "running":
                    break
                if not fields.get("waits_for"):
                    raise RuntimeError(f"the first call says nothing: {fields}")
                tool, arguments = "get_execution", {"execution_id": fields["execution_id"], "wait_s": 45}
            taken.result = time.perf_counter() - began
            if fields["result"] != "2":
                raise RuntimeError(f"1 + 1 gave {fields}")
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
    return taken


_HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "0"}}


async def _send(process: asyncio.subprocess.Process, method: str, number: int | None, params: dict[str, Any]) -> None:
    assert process.stdin is not None
    message = {"jsonrpc": "2.0", "method": method, "params": params, **({} if number is None else {"id": number})}
    process.stdin.write(json.dumps(message).encode() + b"\n")
    await process.stdin.drain()


async def _answer(process: asyncio.subprocess.Process, number: int, taken: _FirstCall, began: float) -> dict[str, Any]:
    """The answer to a request; what the server reports meanwhile is noted."""
    assert process.stdout is not None
    while True:
        message = json.loads(await process.stdout.readline())
        if message.get("method") == "notifications/progress":
            taken.lines += 1
            if not taken.said:
                taken.progress, taken.said = time.perf_counter() - began, message["params"].get("message", "")
        elif message.get("id") == number and "method" not in message:
            return message


@dataclass(slots=True)
class _Count:
    received: int = 0


@asynccontextmanager
async def _counting_proxy() -> AsyncGenerator[tuple[int, _Count]]:
    """A proxy for HTTPS on the loopback interface, which counts what comes back."""
    count = _Count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            host, _, port = head.split()[1].rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(copy(reader, far_writer, is_counted=False), copy(far_reader, writer, is_counted=True))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_counted: bool) -> None:
        try:
            while chunk := await reader.read(65_536):
                count.received += len(chunk) if is_counted else 0
                writer.write(chunk)
                await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], count
    finally:
        server.close()


# What a model reads


async def _tokens(stage: Stage) -> list[Figure]:
    ours = await _our_texts(stage)
    async with open_ipykernel(stage) as kernel:
        theirs = [json.dumps(await kernel.outputs(code), ensure_ascii=False) for code, _ in CELLS]
    lost = [
        f"{code!r} lacks {needle!r}"
        for (code, needles), text in zip(CELLS, ours, strict=True)
        for needle in needles
        if needle not in text
    ]
    kept = platformdirs.user_cache_path("belljar") / "bench"
    counted = count_tokens([*ours, *theirs], kept)
    our_tokens, their_tokens = counted[: len(ours)], counted[len(ours) :]
    for line in lost:
        print(f"first-hour: lost: {line}", file=sys.stderr)
    return [
        Figure(
            NAME,
            f"{len(CELLS)} results, read by a model",
            "tokens",
            sum(our_tokens),
            sum(their_tokens),
            target=TARGET,
            note="peer: ipykernel's messages, without pictures",
        ),
        Figure(NAME, "of what it needs, lost", "facts", len(lost), target=0, bound="value"),
    ]


async def _our_texts(stage: Stage) -> list[str]:
    """The text of each result, as the second and later calls in a session have it."""
    texts: list[str] = []
    async with open_stdio(stage, belljar_command(), "modern") as client:
        started = await client.call_tool("execute_code", {"code": "pass"})
        session_id = (started.structured_content or {})["session_id"]
        for code, _ in CELLS:
            answer = await client.call_tool("execute_code", {"code": code, "session_id": session_id})
            texts.append("\n".join(block.text for block in answer.content if block.type == "text"))
    return texts
