"""What a server does about the limits it is started with, and who is killed first when memory runs out."""

import resource
from pathlib import Path

import pytest
from calls import Caller
from mcp import Client

from belljar.environments import Environment
from serving_process import COLD, http_server, serve_over_http

pytestmark = pytest.mark.anyio


async def test_a_server_may_open_as_many_files_as_its_hard_limit_allows_and_outlives_its_sessions(
    default_environment: Environment, tmp_path: Path
) -> None:
    program = ["sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh", *serve_over_http(default_environment)]
    with http_server(program, tmp_path, **COLD) as (url, process):
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft > 256
        assert soft == 65_536 or soft == hard
        async with Client(f"{url}/mcp") as client:
            seen = await Caller(client).execute("print(open('/proc/self/oom_score_adj').read())")
        assert int(seen.stdout) > int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())
