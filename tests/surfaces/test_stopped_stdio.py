"""A stdio server that is told to stop, or that nobody reads any more, ends well and keeps what its sessions hold.

In short; `test_stopped_servers.py` has every signal, at every moment, over every transport.
"""

from pathlib import Path

from wires import opened_wire, tool_call

from belljar.environments import Environment

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
