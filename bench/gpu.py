"""A GPU through a sandboxed server: as fast inside as outside, and how soon a new session has its first tensor.

The peer is a plain process of the same Python, which `BELLJAR_GPU_PYTHON` names; it must have torch.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client

from belljar.environments import open_environment
from belljar.sandboxes.gpus import find_gpus
from belljar.settings import Settings
from bench.figures import Figure
from bench.servers import belljar_command, open_stdio
from bench.stage import Stage

SPEED_TARGET = 0.98
ON_DEMAND_TARGET = 12.0
CONTEXT_TARGET = 100.0
TIMEOUT_S = 120.0

# Ten timed products of 8192×8192 matrices in bf16 after three that warm up, in TFLOP/s.
PRODUCT = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
def rate(count=10):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return 2 * 8192**3 * count / start.elapsed_time(end) / 1e9
rate(3)
"""
FIRST_TENSOR = "import torch; torch.ones(3, device='cuda').sum().item()"
CONTEXT = (
    "import ctypes; cuda, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p(); "
    "assert not cuda.cuInit(0) and not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)"
)
SERVER = {
    "BELLJAR_GPUS": "all",
    "BELLJAR_PRELOAD": "numpy, torch",
    "BELLJAR_MEMORY_MB": "32768",
    "BELLJAR_MAX_PROCESSES": "4096",
}


@asynccontextmanager
async def open_gpu_stage(*, is_quick: bool) -> AsyncGenerator[Stage]:
    """A stage around the Python with torch, which needs no package index."""
    python = os.environ.get("BELLJAR_GPU_PYTHON", "")
    if not python or not find_gpus():
        sys.exit("no GPU here" if python else "BELLJAR_GPU_PYTHON names no Python with torch")
    with tempfile.TemporaryDirectory(prefix="belljar-bench-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        settings = Settings(data_directory=folder, environment=python)
        yield Stage(folder, await open_environment(settings, python), is_quick)


async def measure(stage: Stage) -> list[Figure]:
    """Speed first, then how soon."""
    python = str(stage.environment.python)
    outside, inside = await _speeds(stage, python)
    cold = [await _timed(python, FIRST_TENSOR) for _ in range(stage.pick(5, 2))]
    demanded = await _first_tensors(stage, python, {"BELLJAR_POOL_SIZE": "0"})
    ready = await _first_tensors(stage, python, {"BELLJAR_GPU_CONTEXTS": "1"})
    contexts = [await _timed(python, CONTEXT) for _ in range(stage.pick(5, 2))]
    note = f"peer: a plain process of the same Python; n={len(inside)}"
    start = f"peer: a new process; n={len(demanded)} and {len(cold)}"
    return [
        Figure(
            "gpu",
            "bf16 product, inside / outside, as a share of outside",
            "×",
            statistics.median(inside) / statistics.median(outside),
            None,
            SPEED_TARGET,
            "least",
            f"{statistics.median(inside):.0f} and {statistics.median(outside):.0f} TFLOP/s; {note}",
        ),
        Figure(
            "gpu",
            "new session → first tensor, torch preloaded",
            "ms",
            statistics.median(demanded) * 1000,
            statistics.median(cold) * 1000,
            ON_DEMAND_TARGET,
            "gain",
            start,
        ),
        Figure(
            "gpu",
            "the same with a context ready",
            "ms",
            statistics.median(ready) * 1000,
            statistics.median(cold) * 1000,
            CONTEXT_TARGET,
            "gain",
            start,
        ),
        Figure(
            "gpu",
            "a context alone, in a plain process",
            "ms",
            statistics.median(contexts) * 1000,
            note="without torch: the driver's own time, which nothing but a context kept ready saves",
        ),
    ]


async def _speeds(stage: Stage, python: str) -> tuple[list[float], list[float]]:
    """Rates outside and inside, taken in turns, because the GPU's clock drifts with its temperature."""
    code = f"{PRODUCT}\nimport sys\nfor line in sys.stdin:\n    print(rate(), flush=True)"
    process = await asyncio.create_subprocess_exec(
        python, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    outside: list[float] = []
    inside: list[float] = []
    async with _open(stage, python, {}) as client:
        session_id = (await _run(client, PRODUCT))["session_id"]
        for _ in range(stage.pick(20, 5)):
            process.stdin.write(b"\n")
            await process.stdin.drain()
            outside.append(float(await process.stdout.readline()))
            inside.append(float((await _run(client, "rate()", session_id))["result"]))
    process.stdin.close()
    await process.wait()
    return outside, inside


async def _timed(python: str, code: str) -> float:
    """How long a process takes from its start to the end of this code."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(python, "-c", code)
    if await process.wait():
        raise RuntimeError(f"{python} ended with {process.returncode}")
    return time.perf_counter() - began


async def _first_tensors(stage: Stage, python: str, variables: Mapping[str, str]) -> list[float]:
    """How long from the wish for a session to the sum of its first tensor."""
    took: list[float] = []
    async with _open(stage, python, variables) as client:
        await _run(client, "1")  # the server is up, and torch is imported
        for _ in range(stage.pick(8, 4)):
            await asyncio.sleep(3)  # the pool is filled again
            began = time.perf_counter()
            result = await _run(client, FIRST_TENSOR)
            took.append(time.perf_counter() - began)
            if result["result"] != "3.0":
                raise RuntimeError(f"execute_code answered {json.dumps(result)[:2_000]}")
            await client.call_tool("clear_session", {"session_id": result["session_id"]})
    return took


@asynccontextmanager
async def _open(stage: Stage, python: str, variables: Mapping[str, str]) -> AsyncGenerator[Client]:
    own = {**SERVER, "BELLJAR_ENVIRONMENT": python, **variables}
    async with open_stdio(stage, belljar_command(), "legacy", own) as client:
        # Sessions are forked once the process with torch is warm.
        deadline = time.monotonic() + TIMEOUT_S
        while (await _run(client, "'zygote' in __import__('sys').orig_argv"))["result"] != "True":
            if time.monotonic() > deadline:
                raise RuntimeError("sessions are not forked: torch does not load ahead")
            await asyncio.sleep(1)
        yield client


async def _run(client: Client, code: str, session_id: str = "") -> dict[str, Any]:
    answer = await client.call_tool("execute_code", {"code": code, "session_id": session_id})
    result: dict[str, Any] = answer.structured_content or {}
    if result.get("status") != "ok":
        raise RuntimeError(f"execute_code answered {json.dumps(result)[:2_000]} {answer.content}")
    return result
