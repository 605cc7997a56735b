"""Tasks with software of others: npm's `ext-tasks` as a client, also across a server that is killed."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from belljar.environments import Environment
from registry_packages import Unreachable, node, npm_folder
from serving_process import COLD, http_server, serve_over_http
from shared_environment import shared_settings

SCRIPT = Path(__file__).with_name("task_follower.mjs")
PACKAGES = ("@modelcontextprotocol/client@2.4.0", "@modelcontextprotocol/ext-tasks@0.2.2")
Follow = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def follow(tmp_path_factory: pytest.TempPathFactory) -> Follow:
    """Runs the script that calls a tool through the packages, and returns what it printed."""
    try:
        packages = npm_folder(shared_settings().data_directory / "mcp-servers" / "ext-tasks", *PACKAGES)
        program = str(node()[0])
    except Unreachable as error:
        pytest.skip(f"ext-tasks: {error}")
    folder = tmp_path_factory.mktemp("ext-tasks")
    # Node looks for packages beside the script.
    (folder / "node_modules").symlink_to(packages / "node_modules")
    (folder / SCRIPT.name).write_bytes(SCRIPT.read_bytes())

    def following(url: str, **wanted: Any) -> dict[str, Any]:
        command = [program, str(folder / SCRIPT.name), f"{url}/mcp", json.dumps(wanted)]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return following


def test_a_foreign_client_follows_asks_cancels_and_survives_a_killed_server(
    follow: Follow, default_environment: Environment, tmp_path: Path
):
    execute = {"tool": "execute_code"}
    with http_server(serve_over_http(default_environment), tmp_path, **COLD) as (url, process):
        slow = follow(url, **execute, arguments={"code": "import time; time.sleep(4); print('slept'); 6 * 7"})
        assert (slow["kind"], slow["status"]) == ("task", "completed")
        assert "slept\nOut[1]: 42" in slow["result"]["content"][0]["text"]
        assert slow["sent"]["tools/call"] == 1
        assert 1 <= slow["sent"]["tasks/get"] <= 12
        quick = follow(url, **execute, arguments={"code": "1 + 1", "wait_s": 30})
        assert quick["kind"] in ("immediate", "task")  # a cold session may take longer than two seconds to start
        asked = follow(
            url, **execute, answer="Ada", arguments={"code": "import time; time.sleep(4); input('Who? ')", "wait_s": 0}
        )
        assert asked["asked"] == ["Who? "]
        assert "'Ada'" in asked["result"]["content"][0]["text"]
        stopped = follow(url, **execute, cancel=True, arguments={"code": "while True: pass", "wait_s": 0})
        assert stopped["status"] == "cancelled"
        finished = follow(url, **execute, arguments={"code": "'kept'", "wait_s": 0}, handoff=True)
        again = follow(url, resume=finished["reference"])
        assert "'kept'" in again["result"]["content"][0]["text"]
        lost = follow(
            url, **execute, arguments={"code": "import time; print('on'); time.sleep(99)", "wait_s": 4}, handoff=True
        )
        process.kill()
    with http_server(serve_over_http(default_environment), tmp_path, **COLD) as (url, _):
        kept = follow(url, resume=finished["reference"])
        assert kept["result"] == again["result"]
        ended = follow(url, resume=lost["reference"])
        assert (ended["status"], ended["result"]["isError"]) == ("completed", True)
        assert "its server ended without notice" in ended["result"]["content"][0]["text"]
