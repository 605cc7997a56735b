import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar.control import ask_sessions
from belljar.environments import Environment

pytestmark = pytest.mark.anyio

DEADLINE_S = 90


async def test_a_kernel_opens_its_session_on_a_running_server(
    installed: Path, data_directory: Path, default_environment: Environment
) -> None:
    from jupyter_client.manager import start_new_async_kernel

    told = json.loads((installed / "kernel.json").read_text())
    on_server = {**told, "argv": [*told["argv"], "--on-server"], "env": {}}
    (installed.parent / "on-server").mkdir()
    (installed.parent / "on-server/kernel.json").write_text(json.dumps(on_server))
    flags: dict[str, object] = {"environment": str(default_environment.python), "fork_start": False, "pool_size": 0}
    async with asyncio.timeout(DEADLINE_S), belljar.open_engine(data_directory=data_directory, **flags):
        manager, client = await start_new_async_kernel(kernel_name="on-server")
        try:
            outputs: list[dict[str, Any]] = []
            await client.execute_interactive("6 * 7", output_hook=outputs.append, timeout=60)
            ((_, owner, info),), _ = await ask_sessions(data_directory)
        finally:
            client.stop_channels()
            await manager.shutdown_kernel()
        left, _ = await ask_sessions(data_directory)
    (result,) = [one["content"]["data"] for one in outputs if one["msg_type"] == "execute_result"]
    assert result == {"text/plain": "42"}
    assert (owner.partition(":")[0], info.executions) == ("jupyter", 1)
    assert left == []
