"""A server that is told to stop, by a signal or by a client that goes away, keeps what its sessions hold."""

import signal
import socket
import subprocess
from pathlib import Path

import anyio
import pytest
from calls import Caller, connected, held, opened_runtime
from mcp import Client
from wires import Wire, opened_wire, tool_call

from belljar.environments import Environment
from serving_process import COLD, alive, http_server, serve_command, serve_over_http, tree, variables
from waiting import until_blocking

pytestmark = pytest.mark.anyio
DEADLINE_S = 60
# An object that says when it is being saved, and then waits for the test.
SLOW = (
    "import os, time\nclass Slow:\n    def __reduce__(self):\n        open('saving', 'w').close()\n"
    "        while not os.path.exists('saved'): time.sleep(0.005)\n        return (Slow, ())\n"
    "slow, kept = Slow(), 'kept'"
)
KEPT = "(kept, type(slow).__name__)"


def until_held(wire: Wire) -> None:
    while wire.receive().get("params", {}).get("message") != "held":
        pass


def let_it_be_saved(process: "subprocess.Popen[str] | subprocess.Popen[bytes]", folder: Path) -> None:
    """Send more signals while variables are being saved, as supervisors and impatient people do."""
    until_blocking(lambda: list(folder.glob("sessions/*/**/saving")))
    (begun,) = folder.glob("sessions/*/**/saving")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    (begun.parent / "saved").touch()
    assert process.wait(DEADLINE_S) == 0


async def value_of(
    code: str, session_id: str, environment: Environment, folder: Path, **chosen: bool | float
) -> str | None:
    """What the next server makes of an expression; in this process, which is quicker than one more."""
    async with (
        opened_runtime(environment, folder, **{"hibernate": True, **chosen}) as runtime,
        connected(runtime) as caller,
    ):
        value = (await caller.execute(code, session_id)).result
        await caller.fields("clear_session", session_id=session_id)
        return value


async def test_a_stdio_server_that_is_signalled_or_left_keeps_variables(
    default_environment: Environment, tmp_path: Path
) -> None:
    with opened_wire(default_environment, tmp_path) as wire:
        session_id = wire.call("execute_code", code=SLOW)["session_id"]
        wire.send(tool_call(7, "execute_code", code=held(), session_id=session_id))
        until_held(wire)
        wire.process.terminate()
        # The call under way is answered.
        assert "error" in wire.answer_to(7)
        let_it_be_saved(wire.process, tmp_path)
    with opened_wire(default_environment, tmp_path) as wire:
        assert wire.call("execute_code", code=KEPT, session_id=session_id)["result"] == "('kept', 'Slow')"
        # The answers are larger than a pipe, and nobody reads them.
        wire.send(tool_call(7, "execute_code", code="print('x' * 200_000)", session_id=session_id))
        wire.send(*(tool_call(number, "list_sessions") for number in range(8, 40)))
        wire.process.send_signal(signal.SIGHUP)
        assert wire.process.wait(DEADLINE_S) == 0
    with opened_wire(default_environment, tmp_path) as wire:
        assert wire.call("execute_code", code=KEPT, session_id=session_id)["result"] == "('kept', 'Slow')"
        wire.stdout.close()
        wire.send(tool_call(8, "list_sessions"))
        assert wire.process.wait(DEADLINE_S) == 0
    assert await value_of(KEPT, session_id, default_environment, tmp_path) == "('kept', 'Slow')"
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


async def test_a_stdio_server_that_is_signalled_leaves_its_sessions_to_the_next_with_keep_alive(
    default_environment: Environment, tmp_path: Path
) -> None:
    chosen = {"BELLJAR_KEEP_ALIVE": "true", "BELLJAR_KEEP_ALIVE_S": "60"}
    with opened_wire(default_environment, tmp_path, **chosen) as wire:
        # Nothing that could be saved to disk: who has it next has the very process.
        session_id = wire.call("execute_code", code="lives = (n for n in range(9)); next(lives)")["session_id"]
        # What clients do that are in a hurry: close the pipe, then signal.
        wire.stdin.close()
        wire.process.terminate()
        assert wire.process.wait(DEADLINE_S) == 0
    assert await value_of("next(lives)", session_id, default_environment, tmp_path, keep_alive=True) == "1"
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


async def test_an_http_server_that_is_signalled_again_while_it_saves_keeps_variables(
    default_environment: Environment, tmp_path: Path
) -> None:
    with http_server(serve_over_http(default_environment), tmp_path, **COLD) as (url, process):
        async with Client(f"{url}/mcp") as client:
            session_id = (await Caller(client).execute(SLOW)).session_id
        process.terminate()
        await anyio.to_thread.run_sync(let_it_be_saved, process, tmp_path)
    assert await value_of(KEPT, session_id, default_environment, tmp_path) == "('kept', 'Slow')"


def test_a_server_that_is_signalled_while_it_starts_ends(default_environment: Environment, tmp_path: Path) -> None:
    with subprocess.Popen(
        serve_command(default_environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**variables(tmp_path), **COLD},
    ) as process:
        until_blocking(lambda: list(tmp_path.glob("runs/*/lock")) or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, b"Traceback" in said) == (0, False)


def test_a_server_that_is_signalled_while_its_environment_is_made_ends_with_all_that_makes_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        chosen = {"UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(tmp_path / "uv")}
        with opened_wire(None, tmp_path, **chosen) as wire:
            # Somebody asks for packages, and is never answered.
            asked, _ = silent.accept()
            with asked:
                family = tree(wire.process.pid)
                assert len(family) > 1
                wire.process.terminate()
                assert wire.process.wait(DEADLINE_S) == 0
                until_blocking(lambda: not alive(family))
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()
