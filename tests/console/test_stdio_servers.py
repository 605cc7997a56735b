"""`belljar console` where agents' servers speak stdio: one console for all servers of a data directory."""

import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from calls import Caller
from consoles import events
from mcp import Client

from belljar.environments import Environment
from serving_process import COLD, stdio_server, variables

pytestmark = pytest.mark.anyio


@contextmanager
def console_process(folder: Path) -> Generator[str]:
    """`belljar console`, as in our image, until the block ends, and the link that it printed."""
    with subprocess.Popen(
        [sys.executable, "-m", "belljar", "console", "--no-open", "--data-directory", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**variables(folder), "container": "oci"},
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)
            assert process.stderr is not None
            said = process.stderr.read()
            assert "Traceback" not in said
            assert "reached in this container only" in said


async def test_one_console_shows_the_sessions_of_all_servers(default_environment: Environment, tmp_path: Path) -> None:
    server = stdio_server(default_environment, tmp_path, **COLD)
    async with Client(server) as one, Client(server) as other:
        # Without links there is no way in to a console that has neither keys nor an issuer.
        refused = subprocess.run(
            [sys.executable, "-m", "belljar", "console", "--no-open", "--data-directory", str(tmp_path)],
            capture_output=True,
            text=True,
            env={**variables(tmp_path), "BELLJAR_CONSOLE_LINK": "false"},
        )
        assert (refused.returncode, "console_link is off" in refused.stderr) == (2, True), refused.stderr
        first = await Caller(one).execute("print('from one')")
        second = await Caller(other).execute("print('from the other')")
        with console_process(tmp_path) as link:
            url, _, token = link.partition("/console/enter#")
            assert url.startswith("http://127.0.0.1:")
            async with httpx.AsyncClient(
                base_url=url, headers={"Sec-Fetch-Site": "same-origin"}, timeout=30
            ) as browser:
                assert (await browser.get("/api/v1/sessions")).status_code == 401
                assert (await browser.post("/console/enter", data={"token": token})).status_code == 303
                listed = (await browser.get("/api/v1/sessions")).json()["items"]
                assert {entry["session_id"] for entry in listed} == {first.session_id, second.session_id}
                assert len({entry["server"] for entry in listed}) == 2
                page = (await browser.get(f"/console/sessions/{second.session_id}")).text
                assert "from the other" in page
                # A cell of the person's, followed as it comes, and told to the agent.
                path = f"/api/v1/sessions/{first.session_id}"
                async with events(browser, f"{path}/events?after={first.execution_id}:1") as happened:
                    queued = await browser.post(f"{path}/executions", json={"code": "print('from a person')"})
                    assert queued.status_code == 202, queued.text
                    texts = ""
                    async for event in happened:
                        texts += event["data"].get("output", {}).get("text", "")
                        if event["event"] == "ended" and event["data"]["execution_id"] != first.execution_id:
                            break
                    assert "from a person\n" in texts
                told = await Caller(one).execute("1", first.session_id)
                assert "ran a cell in this session since your last one" in "".join(told.output)
                servers = (await browser.get("/api/v1/servers")).json()["items"]
                assert [server["is_answering"] for server in servers] == [True, True]
                assert (await browser.get("/console/health")).status_code == 200
    # Both servers have ended with their clients: there is nobody to ask any more.
    done = subprocess.run(
        [sys.executable, "-m", "belljar", "console", "--no-open", "--data-directory", str(tmp_path)],
        capture_output=True,
        text=True,
        env=variables(tmp_path),
    )
    assert done.returncode == 1
    assert "no running server uses" in done.stderr
