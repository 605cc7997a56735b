"""The peer of the console: JupyterLab of PyPI, in an environment of its own, with its settings as installed."""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from bench.registries import kept, python_environment

REQUIREMENT = "jupyterlab>=4.6,<5"
READY_S = 60.0


@asynccontextmanager
async def open_jupyterlab(folder: Path) -> AsyncGenerator[str]:
    """Serve the notebooks of a folder; the address. Raises `Unreachable` where it cannot be installed."""
    environment = await asyncio.to_thread(python_environment, kept() / "peer-jupyterlab", REQUIREMENT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = folder / "jupyter"
    places = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
    process = await asyncio.create_subprocess_exec(
        str(environment / "bin/jupyter-lab"), "--no-browser", "--allow-root", "--IdentityProvider.token=",
        f"--ServerApp.port={port}", f"--ServerApp.root_dir={folder}", "--ServerApp.ip=127.0.0.1",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **{name: str(own / place) for name, place in places.items()}, "HOME": str(own)},
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(READY_S), httpx.AsyncClient() as client:
            while not await _answers(client, f"{address}/api"):
                if process.returncode is not None:
                    raise RuntimeError("JupyterLab ended before it was ready")
                await asyncio.sleep(0.1)
        yield address
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False
