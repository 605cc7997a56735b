"""The log: what its lines carry, and what they never do."""

import io
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import anyio
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from belljar import logs
from belljar.environments import Environment
from serving_process import READY, serve_over_http, variables

SECRET = "hush4711"


class Log:
    """What a server has written to stderr."""

    def __init__(self, stream: IO[str]) -> None:
        self.lines: list[str] = []
        self._urls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, args=(stream,))
        self.reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line)
            if found := READY.search(line):
                self._urls.put(found[1])

    def url(self) -> str:
        return self._urls.get(timeout=90)


@contextmanager
def logging_server(environment: Environment, folder: Path, **chosen: str) -> Generator[tuple[str, Log]]:
    process = subprocess.Popen(
        serve_over_http(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**variables(folder), "BELLJAR_LOG_LEVEL": "DEBUG", "TOKEN": SECRET, **chosen},
        cwd=folder,
    )
    assert process.stderr is not None
    log = Log(process.stderr)
    try:
        yield log.url(), log
    finally:
        process.terminate()
        process.wait(30)
        log.reader.join()
        process.stderr.close()


async def _tell_secrets(url: str, era: str) -> str:
    """Everything that a caller can put a secret into. Returns a session's id."""
    async with Client(streamable_http_client(f"{url}/mcp"), mode=era) as client:

        async def call(tool: str, **arguments: Any) -> dict[str, Any]:
            return (await client.call_tool(tool, arguments)).structured_content or {}

        code = f"{SECRET} = '{SECRET}'\nprint({SECRET})\nopen('{SECRET}.txt', 'w').close()\n{SECRET}"
        session = (await call("execute_code", code=code, filename=f"{SECRET}.py"))["session_id"]
        await call("execute_code", session_id=session, code=f"raise ValueError('{SECRET}')")
        await call("execute_code", session_id=session, code=f"import os\nos.environ['X'] = '{SECRET}'\n!echo $X")
        await call("execute_code", session_id=session, code=f"print('{SECRET}')\nimport os\nos._exit(3)")
        await call("execute_code", code=[SECRET])
        await call("execute_code", session_id=SECRET, code="1")
        await call("upload_file", session_id=session, name=f"../{SECRET}", text=SECRET)
        await call("download_file", session_id=session, name=f"{SECRET}-not-there")
        await call("new_session", environment=f"kernel:{SECRET}")
        await call(SECRET)
        await client.read_resource(f"kernel://{session}/{SECRET}.txt")
        with pytest.raises(MCPError):
            await client.read_resource(f"kernel://{session}/{SECRET}-not-there")
        other = (await call("execute_code", code=f"{SECRET} = 1"))["session_id"]
        await call("clear_session", session_id=other)
    return session


@pytest.fixture(scope="module", params=[("json", "2026-07-28"), ("text", "legacy")], ids=["json", "text"])
def told(
    request: pytest.FixtureRequest, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, list[str]]:
    """Return the log's format, a session, and everything the server logged."""
    form, era = request.param
    folder = tmp_path_factory.mktemp("server")
    with logging_server(default_environment, folder, BELLJAR_LOG_FORMAT=form) as (url, log):
        session = anyio.run(_tell_secrets, url, era)
    return form, session, log.lines


def test_no_line_holds_code_output_names_or_values_even_at_debug(told: tuple[str, str, list[str]]) -> None:
    _, session, lines = told
    assert f"session {session} created" in "".join(lines)
    assert [line for line in lines if SECRET in line] == []


def test_every_line_says_what_it_is_about(told: tuple[str, str, list[str]]) -> None:
    form, session_id, written = told
    if form == "text":
        assert all(
            re.match(r"(DEBUG|INFO|WARNING|ERROR) [\w.]+: |belljar serves |the console is at ", line)
            for line in written
        )
        return
    lines = [json.loads(line) for line in written]
    (created,) = (line for line in lines if line["message"].startswith(f"session {session_id} created"))
    assert created["session_id"] == session_id
    assert created["principal"] == logs.pseudonym("local")
    assert (created["level"], created["logger"]) == ("INFO", "belljar.sessions.registry")
    assert created["time"].endswith("+00:00")
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


# Lines one by one


@contextmanager
def logged(form: logs.Format) -> Generator[io.StringIO]:
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    logs.configure("DEBUG", form, stream)
    try:
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_a_line_carries_the_ids_that_are_bound_and_those_it_is_given() -> None:
    ours = logging.getLogger("belljar.test")
    with logged("json") as stream:
        with logs.about(principal="key:ada", session_id="s1"):
            ours.info("one")
            with logs.about(execution_id="e1"):
                ours.info("two", extra={"session_id": "s2"})
        ours.info("three")
    one, two, three = map(json.loads, stream.getvalue().splitlines())
    ada = logs.pseudonym("key:ada")
    assert (one["session_id"], one["principal"]) == ("s1", ada)
    assert (two["session_id"], two["execution_id"], two["principal"]) == ("s2", "e1", ada)
    assert three.keys() == {"time", "level", "logger", "message"}
    assert "ada" not in ada


@pytest.mark.anyio
async def test_what_a_task_binds_is_its_own() -> None:
    ours = logging.getLogger("belljar.test")

    async def work(name: str) -> None:
        logs.bind(execution_id=name)
        await anyio.lowlevel.checkpoint()
        ours.info("from %s", name)

    with logged("json") as stream:
        async with anyio.create_task_group() as tasks:
            for name in ("a", "b"):
                tasks.start_soon(work, name)
        ours.info("after")
    *inside, after = map(json.loads, stream.getvalue().splitlines())
    assert [(line["message"], line["execution_id"]) for line in inside] == [("from a", "a"), ("from b", "b")]
    assert "execution_id" not in after


@pytest.mark.parametrize("form", ["text", "json"])
def test_of_an_exception_there_is_its_type_and_its_place_but_not_its_words(form: logs.Format) -> None:
    def fail() -> None:
        try:
            raise FileNotFoundError(2, "No such file", f"/{SECRET}")
        except FileNotFoundError as error:
            raise ValueError(SECRET) from error

    with logged(form) as stream:
        try:
            fail()
        except ValueError:
            logging.getLogger("belljar.test").exception("it failed")
    text = stream.getvalue()
    assert SECRET not in text
    assert all(part in text for part in ("it failed", "ValueError", "FileNotFoundError: No such file", "in fail"))
    assert len(text.splitlines()) > 1 or json.loads(text)["exception"][0].startswith("FileNotFoundError")


def test_of_libraries_there_are_warnings_without_the_texts_they_were_given() -> None:
    library = logging.getLogger("mcp.server.test")
    with logged("text") as stream:
        library.info("Resource %r failed", SECRET)
        library.debug("chunk: %s", SECRET)
        library.warning("refused %s after %d tries, %5.1f%% of %r", SECRET, 3, 12.5, [SECRET])
        library.warning("named %(what)s and %(count)d", {"what": SECRET, "count": 2})
        library.error(f"Task exception was never retrieved\nfuture: <Task {SECRET}>")
    assert stream.getvalue().splitlines() == [
        "WARNING mcp.server.test: refused … after 3 tries, 12.5% of …",
        "WARNING mcp.server.test: named … and 2",
        "ERROR mcp.server.test: Task exception was never retrieved",
    ]


def test_what_libraries_repeat_is_shown_a_few_times_a_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    library, ours = logging.getLogger("some.library"), logging.getLogger("belljar.test")

    def flood() -> None:
        library.warning("Invalid HTTP request received.")

    with logged("text") as stream:
        for _ in range(1_000):
            flood()
            ours.info("ours")
        library.warning(f"Invalid Host header: {'x' * 10_000}")
        lines = stream.getvalue().splitlines()
        assert lines.count("WARNING some.library: Invalid HTTP request received.") == 5
        assert lines.count("INFO belljar.test: ours") == 1_000
        assert max(map(len, lines)) < 400
        later = time.monotonic() + 60
        monkeypatch.setattr(time, "monotonic", lambda: later)
        flood()
    assert stream.getvalue().splitlines()[-1].endswith("received. (995 more like this were left out before)")


def test_text_is_what_people_get_without_asking() -> None:
    with logged("text") as stream:
        logging.getLogger("belljar.test").warning("%d of %s", 1, "two")
    assert stream.getvalue() == "WARNING belljar.test: 1 of two\n"


def test_a_line_break_cannot_forge_a_line() -> None:
    for form, expected in (("text", "INFO belljar.test: one\\nERROR two\n"), ("json", "one\nERROR two")):
        with logged("json" if form == "json" else "text") as stream:
            logging.getLogger("belljar.test").info("one\nERROR two")
        text = stream.getvalue()
        assert (json.loads(text)["message"] if form == "json" else text) == expected


def test_the_module_is_cheap() -> None:
    code = "import sys, belljar.logs; sys.exit('belljar.settings' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


PRIORITIES = """
import logging, sys
from belljar import logs
logs.configure("INFO", sys.argv[1])
logging.getLogger("belljar.trial").warning("first")
try:
    raise ValueError
except ValueError:
    logging.getLogger("belljar.trial").exception("second")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_for_systemds_journal_begin_with_their_priority_and_others_do_not(tmp_path: Path, form: str) -> None:
    with (tmp_path / "log").open("w+") as log:
        status = os.fstat(log.fileno())
        named = {**os.environ, "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        subprocess.run([sys.executable, "-c", PRIORITIES, form], env=named, stderr=log, check=True)
        lines = (tmp_path / "log").read_text().splitlines()
    assert (lines[0][:3], lines[1][:3]) == ("<4>", "<3>")
    assert all(line.startswith("<3>") for line in lines[1:]), "each line of a traceback is one of the journal's"
    if form == "json":
        assert [json.loads(line[3:])["message"] for line in lines] == ["first", "second"]
    other = subprocess.run(
        [sys.executable, "-c", PRIORITIES, form], env=named, capture_output=True, text=True, check=True
    )
    assert "<" not in other.stderr.splitlines()[0], "a pipe to somebody else is none"
