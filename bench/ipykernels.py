"""The peer of kernels: a plain ipykernel under jupyter_client, in the same environment as our sessions."""

import asyncio
import os
import queue
import secrets
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from jupyter_client import AsyncKernelClient, AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

from bench.stage import Stage

TIMEOUT_S = 60.0
SILENCE_S = 2.0

OnText = Callable[[str], object]
OnMessage = Callable[[dict[str, Any]], object]


class _OneSpec(KernelSpecManager):
    """Knows `python3` only, with the interpreter spelled out: jupyter_client would take its own for `python`."""

    python = ""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [self.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


class IPyKernel:
    """A kernel that is ready."""

    def __init__(self, client: AsyncKernelClient) -> None:
        self._client = client

    async def execute(self, code: str, on_text: OnText = len, on_message: OnMessage = len) -> None:
        """Run a cell until it is idle and has replied, which is when its output is complete."""
        message_id = self._client.execute(code)
        while True:
            message = await self._client.get_iopub_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            on_message(message)
            if message["msg_type"] == "stream":
                on_text(message["content"]["text"])
            elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        await self._reply(message_id)

    async def outputs(self, code: str) -> list[dict[str, Any]]:
        """The content of every message that a cell's output comes in, with the bytes of pictures left out."""
        message_id = self._client.execute(code)
        found: list[dict[str, Any]] = []
        while True:
            message = await self._client.get_iopub_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
            if message["msg_type"] in ("stream", "error", "display_data", "execute_result"):
                data = {
                    mime: "" if mime.startswith("image/") else text for mime, text in content.get("data", {}).items()
                }
                found.append({**content, **({"data": data} if data else {})})
        await self._reply(message_id)
        return found

    async def execute_with_pause(self, code: str, pause_s: float, on_text: OnText) -> None:
        """The same with a reader that looks away after the first output; what was lost may include the end."""
        message_id = self._client.execute(code)
        replied = asyncio.create_task(self._reply(message_id))
        is_paused = False
        while True:
            try:
                message = await self._client.get_iopub_msg(timeout=SILENCE_S)
            except queue.Empty:
                if replied.done():
                    break
                continue
            if message["msg_type"] == "stream":
                on_text(message["content"]["text"])
                if not is_paused:
                    is_paused = True
                    await asyncio.sleep(pause_s)
        await replied

    async def _reply(self, message_id: str) -> dict[str, Any]:
        while True:
            reply = await self._client.get_shell_msg(timeout=TIMEOUT_S)
            if reply["parent_header"].get("msg_id") == message_id:
                return reply


@asynccontextmanager
async def open_ipykernel(stage: Stage) -> AsyncGenerator[IPyKernel]:
    """Start one cold, the way jupyter_client's own callers do."""
    specs = _OneSpec()
    specs.python = str(stage.environment.python)
    connection = stage.folder / f"kernel-{secrets.token_hex(8)}.json"
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs, connection_file=str(connection))
    await manager.start_kernel(
        cwd=str(stage.folder),
        stderr=subprocess.DEVNULL,
        # One profile for the whole run: making it would cost the first kernel more than the others.
        env={**os.environ, "IPYTHONDIR": str(stage.folder / "ipython"), "MPLBACKEND": "agg"},
    )
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=TIMEOUT_S)
        yield IPyKernel(client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
