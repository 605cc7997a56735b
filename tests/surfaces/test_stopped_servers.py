"""A server that is told to stop, by a signal or by a client that goes away, keeps what its sessions hold."""

import signal
import subprocess
from pathlib import Path

from calls import held
from wires import Wire, opened_wire, tool_call

from belljar.environments import Environment
from serving_process import COLD, serve_command, variables

# What comes first, and what comes while the server is busy with ending.
NUMBERS = [(signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGINT)]


def until_held(wire: Wire) -> None:
    while wire.receive().get("params", {}).get("message") != "held":
        pass


def test_a_stdio_server_that_is_signalled_or_left_keeps_variables(
    default_environment: Environment, tmp_path: Path
) -> None:
    session_id = ""
    for turn, (first, second) in enumerate(NUMBERS):
        with opened_wire(default_environment, tmp_path) as wire:
            code = "count = globals().get('count', 0) + 1; count"
            counted = wire.call("execute_code", code=code, session_id=session_id)
            session_id = counted["session_id"]
            assert counted["result"] == str(turn + 1)
            wire.send(tool_call(7, "execute_code", code=held(), session_id=session_id))
            until_held(wire)
            wire.process.send_signal(first)
            # The call under way is answered, and a second signal does not break into what is being kept.
            assert "error" in wire.answer_to(7)
            wire.process.send_signal(second)
            assert wire.process.wait(30) == 0
    with opened_wire(default_environment, tmp_path) as wire:
        assert wire.call("execute_code", code="count", session_id=session_id)["result"] == "2"
        wire.stdout.close()
        wire.send(tool_call(8, "list_sessions"))
        assert wire.process.wait(30) == 0
    with opened_wire(default_environment, tmp_path) as wire:
        assert wire.call("execute_code", code="count", session_id=session_id)["result"] == "2"
        # What clients do that are in a hurry: close the pipe, then signal.
        wire.stdin.close()
        wire.process.terminate()
        assert wire.process.wait(30) == 0
    with opened_wire(default_environment, tmp_path) as wire:
        assert wire.call("execute_code", code="count", session_id=session_id)["result"] == "2"
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


def test_a_client_that_stopped_reading_does_not_keep_the_server_from_ending(
    default_environment: Environment, tmp_path: Path
) -> None:
    with opened_wire(default_environment, tmp_path) as wire:
        session_id = wire.call("execute_code", code="kept = 1")["session_id"]
        # Its answer is larger than a pipe, and nobody reads it.
        wire.send(tool_call(7, "execute_code", code="print('x' * 200_000)", session_id=session_id))
        wire.send(*(tool_call(number, "list_sessions") for number in range(8, 40)))
        wire.process.send_signal(signal.SIGTERM)
        assert wire.process.wait(30) == 0
    with opened_wire(default_environment, tmp_path) as wire:
        assert wire.call("execute_code", code="kept", session_id=session_id)["result"] == "1"


def test_a_server_that_is_signalled_while_it_starts_ends(default_environment: Environment, tmp_path: Path) -> None:
    with subprocess.Popen(
        serve_command(default_environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**variables(tmp_path), **COLD},
    ) as process:
        while not list(tmp_path.glob("runs/*/lock")):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, b"Traceback" in said) == (0, False)
