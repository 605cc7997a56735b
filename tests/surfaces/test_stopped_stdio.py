"""A stdio server that is told to stop, or that nobody reads any more, ends well and keeps what its sessions hold.

In short; `test_stopped_servers.py` has every signal, at every moment, over every transport.
"""

import socket
from pathlib import Path

from wires import opened_wire, tool_call

from belljar.environments import Environment
from serving_process import alive, tree
from waiting import until_blocking

DEADLINE_S = 60


def test_a_signal_keeps_variables_and_a_closed_stdout_is_an_ordinary_end(
    default_environment: Environment, tmp_path: Path
) -> None:
    with opened_wire(default_environment, tmp_path) as wire:
        session_id = wire.call("execute_code", code="kept = 6")["session_id"]
        wire.process.terminate()
        assert wire.process.wait(DEADLINE_S) == 0
    with opened_wire(default_environment, tmp_path) as wire:
        assert wire.call("execute_code", code="kept += 1\nkept", session_id=session_id)["result"] == "7"
        wire.stdout.close()
        wire.send(tool_call(8, "list_sessions"))
        assert wire.process.wait(DEADLINE_S) == 0
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


def test_a_client_that_leaves_while_the_environment_is_made_leaves_nobody_at_work(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        with opened_wire(None, tmp_path, UV_DEFAULT_INDEX=index, UV_CACHE_DIR=str(tmp_path / "uv")) as wire:
            # uv asks for packages, and is never answered.
            asked, _ = silent.accept()
            with asked:
                family = tree(wire.process.pid)
                assert len(family) > 1
                wire.stdin.close()
                assert wire.process.wait(DEADLINE_S) == 0
                until_blocking(lambda: not alive(family))
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()
