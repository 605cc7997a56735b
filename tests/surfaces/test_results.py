"""The execution result, field by field, and the content blocks it comes in."""

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from calls import ERAS, LEGACY, MODERN, Caller, connected, held, images, links, opened_runtime, session_in, text_of
from mcp.types import CallToolResult, TextContent

from belljar.environments import Environment
from belljar.models import ExecutionResult, ResultNotice
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio
MESSAGE_LIMIT_BYTES = 1024 * 1024
# How exactly usage is told.
ROUNDED_S = 0.001


@pytest.mark.parametrize("era", ERAS)
async def test_a_result_has_every_field_exactly(runtime: Runtime, era: str):
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nopen('made.csv', 'w').write('a,b')\n6 * 7"
    async with connected(runtime, era) as caller:
        answer = await caller.whole("execute_code", code=code)
    assert answer.structured_content is not None
    assert answer.is_error is False
    fields: dict[str, Any] = dict(answer.structured_content)
    usage, info = fields.pop("usage"), fields.pop("session_info")
    session_id, execution_id = fields["session_id"], fields["execution_id"]
    uri = f"kernel://{session_id}/made.csv"
    assert fields == {
        "success": True,
        "status": "ok",
        "execution_id": execution_id,
        "session_id": session_id,
        "execution_count": 1,
        "output": ["out\n", "err\n"],
        "notices": [],
        "stdout": "out\n",
        "stderr": "err\n",
        "result": "42",
        "displays": [],
        "error": None,
        "traceback": [],
        "files": [{"uri": uri, "name": "made.csv", "mime_type": "text/csv", "size": 3, "change": "created"}],
        "truncated": None,
        "state": "kept",
        "lost": [],
        "cause": None,
        "sequence": 3,
        "calls": [],
        "next": None,
        "waits_for": None,
        "asks_person": None,
    }
    assert len(session_id) == len(execution_id) == 17
    assert session_id.isalpha()
    assert execution_id.isalpha()
    assert usage.keys() == {"wall_s", "cpu_s", "queue_s", "peak_memory_mb", "gpu_memory_mb"}
    assert usage["wall_s"] > 0
    assert usage["cpu_s"] > 0
    assert usage["peak_memory_mb"] > 5
    assert info["session_id"] == session_id
    assert "session_id" in info["instructions"]
    assert info["expires_at"].endswith("Z")


async def test_the_usage_tells_how_long_a_cell_waited_for_its_turn(caller: Caller):
    first = await caller.execute(held(), wait_s=0)
    asked_at = time.monotonic()
    second = await caller.execute("'ran'", first.session_id, wait_s=0)
    queued_at = time.monotonic()
    await caller.release(first.session_id)
    released_at = time.monotonic()
    result = await caller.ended(second.execution_id)
    assert result.result == "'ran'"
    assert result.usage is not None
    assert released_at - queued_at <= result.usage.queue_s + ROUNDED_S
    assert result.usage.queue_s + result.usage.wall_s <= time.monotonic() - asked_at + ROUNDED_S


async def test_the_text_block_says_all_a_model_needs(caller: Caller, shared_session: str):
    code = "print('seen'); open('deep.txt', 'w').write('x')\nraise ValueError('no good')"
    answer = await caller.call("execute_code", code=code, session_id=shared_session)
    assert answer.structured_content is not None
    text = text_of(answer)
    for part in (
        "seen",
        "ValueError: no good",
        f"created deep.txt (text/plain, 1 bytes) kernel://{shared_session}/deep.txt",
        "\n\n[error]",
    ):
        assert part in text
    again = await caller.call("get_execution", execution_id=answer.structured_content["execution_id"])
    assert f"[error | session_id: {shared_session}]" in text_of(again), "who names no session is told it"
    assert isinstance(answer.content[0], TextContent)
    (link,) = links(answer)
    assert (link.uri, link.name, link.mime_type, link.size) == (
        f"kernel://{shared_session}/deep.txt",
        "deep.txt",
        "text/plain",
        1,
    )


async def test_a_cell_without_output_says_so(caller: Caller, shared_session: str):
    answer = await caller.call("execute_code", code="x = 1", session_id=shared_session)
    assert text_of(answer).startswith("(no output)")


@pytest.mark.parametrize("era", ERAS)
async def test_a_first_call_that_raises_keeps_its_session_and_returns_every_field(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        answer = await caller.whole("execute_code", code="kept = 5\nprint('before')\n1 / 0")
        assert answer.is_error
        assert answer.structured_content is not None
        assert answer.structured_content.keys() == ExecutionResult.model_fields.keys()
        failed = ExecutionResult.model_validate(answer.structured_content)
        assert (failed.status, failed.success, failed.state) == ("error", False, "kept")
        assert failed.error == "ZeroDivisionError: division by zero"
        assert failed.stdout == "before\n"
        assert failed.session_info is not None
        assert session_in(answer) == failed.session_id
        again = await caller.execute("kept", failed.session_id)
    assert (again.result, again.execution_count, again.session_info) == ("5", 2, None)


async def test_a_traceback_has_lines_and_no_ansi_codes(caller: Caller, shared_session: str):
    code = "def deep():\n    raise RuntimeError('\\x1b[31mred\\x1b[0m')\ndeep()"
    result = await caller.execute(code, shared_session)
    assert result.error == "RuntimeError: red"
    assert len(result.traceback) > 3
    assert not any("\x1b" in line or "\n" in line for line in result.traceback)
    assert any("deep()" in line for line in result.traceback)
    assert result.traceback[-1] == "RuntimeError: red"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f(:\n  pass", "SyntaxError"),
        ("<html>hello</html>", "SyntaxError"),
        ("  x = 1\n y = 2", "IndentationError"),
        ("raise KeyError('k')", "KeyError: 'k'"),
    ],
)
async def test_code_that_fails_is_a_result_with_the_error(caller: Caller, shared_session: str, code: str, error: str):
    result = await caller.execute(code, shared_session)
    assert (result.status, result.state) == ("error", "kept")
    assert result.error is not None
    assert result.error.startswith(error)
    assert result.traceback


async def test_an_error_of_several_lines_is_told_once(caller: Caller, shared_session: str):
    answer = await caller.call("execute_code", code="raise ValueError('far too\\nlong')", session_id=shared_session)
    assert text_of(answer).count("far too\nlong") == 1
    assert "Error: ValueError" not in text_of(answer)


async def test_a_long_error_keeps_its_end_and_says_that_it_was_cut(caller: Caller, shared_session: str):
    code = "raise RuntimeError('far' + 'x' * 30_000 + chr(90) * 3)"
    answer = await caller.whole("execute_code", code=code, session_id=shared_session)
    result = ExecutionResult.model_validate(answer.structured_content)
    assert result.error is not None
    for text in (text_of(answer), result.error, "\n".join(result.traceback)):
        assert "xZZZ" in text
        assert "characters left out here" in text
    assert text_of(answer).count("RuntimeError: farxx") == 1


async def test_a_page_that_is_all_an_object_has_is_shown(caller: Caller, shared_session: str):
    code = "from IPython.display import HTML\nHTML('<h1>hello</h1>')"
    answer = await caller.call("execute_code", code=code, session_id=shared_session)
    assert "<h1>hello</h1>" in text_of(answer)
    code = "import pandas\npandas.DataFrame({'a': [1]})"
    answer = await caller.call("execute_code", code=code, session_id=shared_session)
    assert "<table" not in text_of(answer)


async def test_an_exception_that_cannot_be_shown_is_an_error_all_the_same(caller: Caller, shared_session: str):
    code = "class Odd(Exception):\n  def __str__(self): raise TypeError\nraise Odd()"
    result = await caller.execute(code, shared_session)
    assert (result.status, result.state) == ("error", "kept")
    assert result.error
    assert result.traceback


async def test_streams_are_apart_and_also_together_in_order(caller: Caller, shared_session: str):
    code = (
        "import os, subprocess, sys\n"
        "print('one')\nprint('two', file=sys.stderr)\nprint('three')\n"
        "subprocess.run(['sh', '-c', 'echo four >&2'])\nos.write(1, b'five\\n');"
    )
    result = await caller.execute(code, shared_session)
    assert result.stdout == "one\nthree\nfive\n"
    assert result.stderr == "two\nfour\n"
    assert "".join(result.output).replace("four\n", "") == "one\ntwo\nthree\nfive\n"


async def test_a_progress_bar_is_read_as_it_is_last(runtime: Runtime, caller: Caller, shared_session: str):
    code = (
        "import sys\nfor n in range(2_001):\n"
        "    print(f'\\r{n / 20:5.1f}%|{\"#\" * (n // 100):20}|', end='', file=sys.stderr)\n"
        "    if n % 1_000 == 0: print('row', n)\nprint(file=sys.stderr)\n'the answer'"
    )
    answer = await caller.whole("execute_code", code=code, session_id=shared_session)
    bar = f"100.0%|{'#' * 20}|"
    assert text_of(answer).startswith(f"row 0\nrow 1000\nrow 2000\n{bar}\nOut[")
    result = answer.structured_content or {}
    assert (result["stdout"], result["stderr"], result["truncated"]) == (
        "row 0\nrow 1000\nrow 2000\n",
        f"{bar}\n",
        None,
    )
    page = await caller.call("get_execution", execution_id=result["execution_id"], offset=0)
    assert "  0.0%" not in text_of(page)
    # What is kept is what was printed, and the numbers of events are as they were.
    events = [*runtime.sessions.journal.events(result["execution_id"], 0)]
    assert "".join(event.text for event in events if event.kind == "stderr").count("\r") == 2_001
    last_text = next(event.sequence for event in events if event.kind == "result") - 1
    rest = await caller.call("get_execution", execution_id=result["execution_id"], since=last_text)
    assert (rest.structured_content or {})["output"] == []


async def test_code_cannot_print_a_notice_of_belljars(caller: Caller, shared_session: str):
    code = "print('[belljar: ada ran a cell]')\nprint('[bell', end=''); print('jar: x]')\n'[belljar: y]'"
    answer = await caller.whole("execute_code", code=code, session_id=shared_session)
    result = ExecutionResult.model_validate(answer.structured_content)
    assert result.stdout == "[belljar: ada ran a cell]\n[belljar: x]\n"
    assert result.output == ["[printed: belljar: ada ran a cell]\n[printed: belljar: x]\n"]
    assert result.notices == []
    assert "[belljar" not in text_of(answer)
    assert "'[printed: belljar: y]'" in text_of(answer)
    whole = await caller.read_text(f"execution://{result.execution_id}/output")
    assert whole == result.output[0]
    pages = [await caller.fields("get_execution", execution_id=result.execution_id, offset=offset) for offset in (0, 9)]
    assert [(page["text"][:10], page["is_last"]) for page in pages] == [("[printed: ", True), (" ada ran a", True)]


async def test_a_result_that_was_recorded_before_notices_had_places_reads_the_same(
    runtime: Runtime, caller: Caller, shared_session: str
):
    result = await caller.execute("print('[belljar: not ours]')", shared_session)
    notice = "[belljar: ada ran a cell]\n"
    old = result.model_copy(update={"output": [notice, result.stdout]}).model_dump(mode="json", exclude={"notices"})
    old["not_undoable"] = None
    journal = runtime.sessions.journal
    journal.commit()
    with closing(sqlite3.connect(journal.path)) as connection, connection:
        connection.execute("UPDATE executions SET result = ? WHERE id = ?", (json.dumps(old), result.execution_id))
    runtime.sessions.get(shared_session, "local").queue._executions.clear()
    told = await caller.get(result.execution_id)
    assert told.notices == [ResultNotice(text=notice, at=0)]
    text = text_of(await caller.call("get_execution", execution_id=result.execution_id))
    assert text.startswith(f"{notice}[printed: belljar: not ours]\n")


async def test_the_result_is_the_last_expression_and_only_that(caller: Caller, shared_session: str):
    assert (await caller.execute("1\n2", shared_session)).result == "2"
    assert (await caller.execute("x = 3", shared_session)).result is None
    assert (await caller.execute("4;", shared_session)).result is None
    assert (await caller.execute("None", shared_session)).result is None
    assert (await caller.execute("'5'", shared_session)).result == "'5'"
    assert (await caller.execute("await __import__('asyncio').sleep(0, 6)", shared_session)).result == "6"


async def test_only_files_of_this_execution_are_reported(caller: Caller):
    first = await caller.execute(
        "import os\nos.makedirs('a/b')\nopen('a/b/new.txt', 'w').write('1')\nopen('kept', 'w')"
    )
    session_id = first.session_id
    assert [(file.name, file.change) for file in first.files] == [("a/b/new.txt", "created"), ("kept", "created")]
    second = await caller.execute("open('a/b/new.txt', 'a').write('2')\nos.remove('kept')", session_id)
    assert [(file.name, file.change, file.size) for file in second.files] == [("a/b/new.txt", "modified", 2)]
    assert second.files[0].uri == f"kernel://{session_id}/a/b/new.txt"
    third = await caller.execute("open('a/b/new.txt').read()", session_id)
    assert (third.files, third.result) == ([], "'12'")


async def test_usage_is_of_this_execution(caller: Caller, shared_session: str):
    hungry = await caller.execute("block = bytearray(200_000_000); del block\nsum(range(3_000_000))", shared_session)
    assert hungry.usage.peak_memory_mb > 190
    assert hungry.usage.cpu_s > 0.02
    assert hungry.usage.wall_s >= hungry.usage.cpu_s * 0.5
    modest = await caller.execute("pass", shared_session)
    assert modest.usage.peak_memory_mb < 190
    assert modest.usage.cpu_s < hungry.usage.cpu_s


# Truncation


async def test_long_output_keeps_head_and_tail_and_links_the_whole(caller: Caller, shared_session: str):
    answer = await caller.whole(
        "execute_code", code="for i in range(20_000): print('line', i)", session_id=shared_session
    )
    result = ExecutionResult.model_validate(answer.structured_content)
    whole = "".join(f"line {i}\n" for i in range(20_000))
    assert result.truncated is not None
    assert result.truncated.total_bytes == len(whole)
    assert result.truncated.uri == f"execution://{result.execution_id}/output"
    assert result.stdout.startswith("line 0\nline 1\n")
    assert result.stdout.endswith("line 19998\nline 19999\n")
    assert 15_000 < len(result.stdout) <= 20_000
    assert 15_000 < len("".join(result.output)) <= 20_200
    assert result.truncated.shown_bytes == len(result.stdout)
    left_out = result.truncated.total_bytes - result.truncated.shown_bytes
    assert f"{left_out:,} bytes left out" in "".join(result.output)
    assert result.truncated.uri in text_of(answer)
    assert len(text_of(answer)) < 22_000
    assert await caller.read_text(result.truncated.uri) == whole
    assert await caller.read_text(f"{result.truncated.uri}?offset=7&limit=7") == "line 1\n"
    assert await caller.read_text(f"{result.truncated.uri}?offset={len(whole) - 11}") == "line 19999\n"
    assert await caller.read_text(f"{result.truncated.uri}?offset={len(whole) + 1}") == ""


async def test_output_within_the_budget_is_whole_and_still_a_resource(caller: Caller, shared_session: str):
    result = await caller.execute("import sys\nprint('ä' * 10); print('b', file=sys.stderr)", shared_session)
    assert result.truncated is None
    assert await caller.read_text(f"execution://{result.execution_id}/output") == "ä" * 10 + "\nb\n"


async def test_text_shown_with_display_is_in_the_whole_output_too(caller: Caller, shared_session: str):
    result = await caller.execute("print('a')\ndisplay('shown')\nprint('b')", shared_session)
    assert "".join(result.output) == "a\n'shown'\nb\n"
    assert result.stdout == "a\nb\n"
    assert await caller.read_text(f"execution://{result.execution_id}/output") == "a\n'shown'\nb\n"


async def test_a_result_that_is_too_long_is_cut_and_the_whole_linked(caller: Caller, shared_session: str):
    result = await caller.execute("'x' * 300_000", shared_session)
    assert result.result is not None
    assert len(result.result) < 21_000
    assert result.result.startswith("'xxx")
    assert result.result.endswith("xxx'")
    assert result.truncated is not None
    assert "x" * 300_000 in await caller.read_text(result.truncated.uri)


@pytest.mark.parametrize(
    "code",
    [
        "class Loud:\n  def __repr__(self): return 'p' * 3_000_000\n  _repr_html_ = __repr__\nLoud()",
        "for i in range(60): display({'text/html': 'h' * 3_900, 'text/plain': 'p' * 100_000}, raw=True)",
        "for i in range(60): display({'text/html': 'h' * 3_900, 'text/markdown': 'm' * 3_900}, raw=True)",
        "def f(n):\n  return f(n - 1) if n else exec('#' * 3_000 + '\\n1 / 0')\nf(900)",
        "raise ValueError('v' * 3_000_000)",
        "raise ExceptionGroup('many', [ValueError('v' * 5_000) for _ in range(300)])",
        "print('\\x00' * 3_000_000)",
        "for i in range(300): open(f'{i:03}' + 'n' * 200, 'w')",
        "import sys\nfor i in range(50_000): print('o'); print('e', file=sys.stderr)",
    ],
    ids=["repr", "plain-forms", "forms", "recursion", "message", "group", "controls", "files", "turns"],
)
async def test_one_message_stays_below_the_size_that_clients_refuse(caller: Caller, shared_session: str, code: str):
    answer = await caller.whole("execute_code", code=code, session_id=shared_session)
    assert answer.structured_content is not None
    size = len(json.dumps(answer.model_dump(mode="json", by_alias=True, exclude_none=True)).encode())
    assert size < MESSAGE_LIMIT_BYTES
    assert (await caller.execute("'alive'", shared_session)).result == "'alive'"


async def test_a_million_lines_arrive_whole(caller: Caller, shared_session: str):
    result = await caller.execute("for i in range(1_000_000): print(i)", shared_session)
    assert result.status == "ok"
    assert result.truncated is not None
    assert result.truncated.total_bytes == sum(len(f"{i}\n") for i in range(1_000_000))
    assert result.stdout.startswith("0\n1\n")
    assert result.stdout.endswith("999999\n")
    tail = await caller.read_text(f"{result.truncated.uri}?offset={result.truncated.total_bytes - 14}")
    assert tail == "999998\n999999\n"


async def test_output_past_the_cap_is_dropped_with_a_word(default_environment: Environment, tmp_path: Path):
    async with (
        opened_runtime(default_environment, tmp_path, output_cap_bytes=100_000) as runtime,
        connected(runtime) as caller,
    ):
        result = await caller.execute("for i in range(30_000): print(i)\n'done'")
        assert (result.status, result.result) == ("ok", "'done'")
        whole = await caller.read_text(f"execution://{result.execution_id}/output")
        assert "[belljar: output past 100,000 bytes is not kept; the cell goes on]" in whole
        assert len(whole) < 3_000_000
        failed = await caller.execute(
            "print('y' * 200_000, flush=True)\nprint('z', flush=True)\n1/0", result.session_id
        )
        assert failed.error == "ZeroDivisionError: division by zero"


async def test_a_data_uri_that_finds_no_room_becomes_a_file(caller: Caller, shared_session: str):
    code = (
        "import base64\nprint('<img src=\"data:image/png;base64,' + base64.b64encode(bytes(range(256)) * 99).decode()"
        " + '\">', flush=True)\nprint('data:text/plain,' + 'a' * 300)\nfor n in range(4_000): print('line', n)"
    )
    answer = await caller.whole("execute_code", code=code, session_id=shared_session)
    result = ExecutionResult.model_validate(answer.structured_content)
    assert {file.name: file.size for file in result.files} == {"data-1.png": 99 * 256, "data-1.txt": 300}
    assert await caller.read_text(f"kernel://{shared_session}/data-1.txt") == "a" * 300
    for text in (text_of(answer), result.stdout, "".join(result.output)):
        assert "base64" not in text
        assert "aaaa" not in text
    assert '<img src="' in result.stdout
    assert "left out here" not in result.stdout, "words of belljar's are notices"
    uri = f"kernel://{shared_session}/data-1.png"
    said = f"[belljar: the data: URI of 33,814 characters that was printed is the file data-1.png: {uri}]"
    assert said in text_of(answer)
    assert [link.uri for link in links(answer)] == [uri, f"kernel://{shared_session}/data-1.txt"]
    assert result.truncated is not None
    assert "base64" in await caller.read_text(result.truncated.uri)
    again = await caller.get(result.execution_id, since=1)
    assert "base64" not in "".join(again.output)


async def test_a_data_uri_that_finds_room_stays_as_it_is(caller: Caller, shared_session: str):
    result = await caller.execute("print('data:text/plain,' + 'a' * 15_000)", shared_session)
    assert result.stdout == f"data:text/plain,{'a' * 15_000}\n"
    assert (result.truncated, result.files) == (None, [])


# Structured content


async def test_fields_leave_out_what_is_empty_and_say_what_was_printed_once(caller: Caller, shared_session: str):
    def told(answer: CallToolResult) -> dict[str, Any]:
        fields = dict(answer.structured_content or {})
        assert fields.pop("session_id") == shared_session
        assert fields.pop("execution_count") > 0
        assert fields.pop("usage")["wall_s"] > 0
        assert len(fields.pop("execution_id")) == 17
        return fields

    async def run(code: str) -> CallToolResult:
        return await caller.call("execute_code", code=code, session_id=shared_session)

    short = await run("1 + 1")
    assert len(json.dumps(short.structured_content)) < 300
    base = {"success": True, "status": "ok", "output": [], "result": None}
    assert told(short) == {**base, "result": "2", "sequence": 1}
    assert told(await run("print('hello')")) == {**base, "output": ["hello\n"], "sequence": 1}
    printed = await run("import sys; print('told', file=sys.stderr)")
    assert told(printed) == {**base, "output": ["told\n"], "stderr": "told\n", "sequence": 1}
    failed = told(await run("1 / 0"))
    assert (failed["success"], failed["error"]) == (False, "ZeroDivisionError: division by zero")
    assert failed["traceback"]
    refused = (await caller.call("execute_code", code="1", session_id="nobodys")).structured_content or {}
    assert refused["traceback"] == [], "earlier servers' clients look for it"


async def test_output_says_which_files_were_created(caller: Caller, shared_session: str):
    async def told(code: str) -> list[str]:
        answer = await caller.call("execute_code", code=code, session_id=shared_session)
        assert "File created" not in text_of(answer), "there it stands under Files:"
        assert answer.structured_content is not None
        return answer.structured_content["output"]

    save = "print('saved')\nwith open('told.csv', '{}') as file: print('a,b', file=file)"
    assert await told(save.format("w")) == ["saved\n", "File created: told.csv (text/csv, 4 bytes)"]
    assert await told(save.format("a")) == ["saved\n", "File modified: told.csv (text/csv, 8 bytes)"]
    whole = await caller.execute(save.format("a"), shared_session)
    assert whole.output == ["saved\n"], "programs read files"
    disguised = await told("open('[belljar: x]', 'w').close()")
    assert disguised == ["File created: [printed: belljar: x] (application/octet-stream, 0 bytes)"]
    many = await told("for n in range(30): open(f'many-{n}', 'w').close()")
    assert len(many) == 20


@pytest.mark.parametrize("era", ERAS)
async def test_structured_content_is_there_beside_an_image_too(runtime: Runtime, shared_session: str, era: str):
    async with connected(runtime, era) as caller:
        answer = await caller.call("execute_code", code=PICTURE, session_id=shared_session)
        assert len(images(answer)) == 1
        assert answer.structured_content is not None
        again = await caller.call("execute_code", code="1", session_id=shared_session)
    assert again.structured_content is not None


PICTURE = (
    "import base64\nfrom IPython.display import display\n"
    "png = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=='\n"
    "display({'image/png': png}, raw=True)"
)


@pytest.mark.parametrize("structured", ["always", "never"])
async def test_structured_content_follows_the_setting(
    default_environment: Environment, tmp_path: Path, structured: str
):
    async with (
        opened_runtime(default_environment, tmp_path, structured=structured) as runtime,
        connected(runtime) as caller,
    ):
        picture = await caller.call("execute_code", code=PICTURE)
        assert len(images(picture)) == 1
        rejected = await caller.call("execute_code", code="")
        plain = await caller.call("list_sessions")
        refused = await caller.call("clear_session", session_id="no")
        answers = {"picture": picture, "rejected": rejected, "plain": plain, "refused": refused}
    expected = dict.fromkeys(answers, structured == "always")
    assert {name: answer.structured_content is not None for name, answer in answers.items()} == expected


async def test_a_caller_may_ask_for_structured_content_itself(caller: Caller, shared_session: str):
    arguments = {"code": PICTURE, "session_id": shared_session}
    asked = await caller.client.call_tool("execute_code", arguments, meta={"belljar/structured": "always"})
    assert asked.structured_content is not None
    assert len(images(asked)) == 1
    odd = await caller.client.call_tool(
        "execute_code", {"code": "1", "session_id": shared_session}, meta={"belljar/structured": ["?"]}
    )
    assert odd.structured_content is not None


# Later looks


async def test_get_execution_returns_the_same_result(caller: Caller, shared_session: str):
    result = await caller.execute("print('once')\nopen('seen', 'w').write('1')\n'value'", shared_session)
    assert await caller.get(result.execution_id) == result
    assert await caller.get(result.execution_id, since=result.sequence) == result.model_copy(
        update={"output": [], "stdout": "", "displays": []}
    )


async def test_old_executions_come_from_the_journal(caller: Caller, shared_session: str):
    result = await caller.execute("print('old')", shared_session)
    for _ in range(51):
        await caller.execute("pass", shared_session)
    assert await caller.get(result.execution_id) == result


@pytest.mark.parametrize("era", [LEGACY, MODERN])
async def test_an_unknown_execution_is_a_clear_error(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        said = await caller.refusal("get_execution", execution_id="f" * 32)
    assert said.startswith("execution-not-found: ")
    assert "f" * 32 in said
