"""Every Python block of the documentation is run: programs in this process, cells in sessions, plugins as plugins."""

import asyncio
import base64
import inspect
import json
import os
import re
import sys
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import AsyncGenerator, Coroutine
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pdf_forms
import pytest
from calls import connected, opened_runtime, served_over_http, text_of
from doc_pages import Snippet, of_page, snippets
from mcp.types import ElicitResult

import belljar
from belljar.environments import Environment
from belljar.hooks import ToolCallFacts
from belljar.runtime import Runtime

TESTS = Path(__file__).parents[1]

ADDRESS = "http://127.0.0.1:8000/mcp"
SHOWN_BY = {
    "docs/guides/sandbox-providers.md": "tests/sandboxes/test_installed_providers.py installs and runs it",
}
"""Pages whose Python another test runs."""
NEEDS_A_BROWSER = "browser="
PLUGINS = "docs/guides/plugins.md"
SKILL = """---
name: sales-report
description: Counts sales a month. Use it for monthly reports.
---
Call `monthly(rows)`.
"""
CODE = "import sys\n\ndef monthly(rows):\n    return len(rows)\n\nif __name__ == '__main__':\n    print(sys.argv)\n"

PYTHON = [snippet for snippet in snippets("python") if snippet.page not in SHOWN_BY]
PROGRAMS = [snippet for snippet in PYTHON if "belljar." in snippet.text and snippet.page != PLUGINS]
CELLS = sorted({snippet.page for snippet in PYTHON if snippet not in PROGRAMS and snippet.page != PLUGINS})


# Programs


@pytest.fixture
def place(default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    chosen = {"ENVIRONMENT": default_environment.python, "DATA_DIRECTORY": tmp_path / "data", "LOG_LEVEL": "ERROR"}
    for name, value in {**chosen, "PRELOAD": "json", "POOL_SIZE": "0"}.items():
        monkeypatch.setenv(f"BELLJAR_{name}", str(value))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "snippet", [snippet for snippet in PROGRAMS if ADDRESS not in snippet.text], ids=lambda snippet: snippet.place
)
def test_programs_run_as_they_stand(snippet: Snippet, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each starts an engine of its own, which takes seconds: what `tests/test_api.py` tries too is for long runs.
    is_short = snippet.page == "README.md" or ".fork(" in snippet.text
    if not is_short and not os.environ.get("BELLJAR_LONG"):
        pytest.skip("a long trial: BELLJAR_LONG=1 runs it")
    # Only forks need a warm process, which takes a while.
    monkeypatch.setenv("BELLJAR_FORK_START", str(".fork(" in snippet.text).lower())
    # `frame` wants pandas on this side, and our own environment does without.
    lacks_pandas = ".frame(" in snippet.text.strip().splitlines()[-1] and find_spec("pandas") is None
    refused = pytest.raises(belljar.UsageError, match="pandas is not installed here")
    with refused if lacks_pandas else nullcontext():
        started = begun(snippet.text, snippet.place)
        if started is not None:
            asyncio.run(started)


@pytest.mark.anyio
async def test_programs_that_connect_run_as_they_stand(runtime: Runtime) -> None:
    connecting = [snippet for snippet in PROGRAMS if ADDRESS in snippet.text]
    assert connecting
    async with served_over_http(runtime) as url:
        for snippet in connecting:
            text = snippet.text.replace(ADDRESS, f"{url}/mcp").replace("…", "key")
            started = begun(text, snippet.place)
            assert started is not None
            await started


def begun(text: str, place: str) -> Coroutine[Any, Any, None] | None:
    """Run a program; one that awaits outside of functions, as notebooks let it, is returned to be awaited."""
    code = compile(f"import belljar\n{text}", place, "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT)
    started = eval(code, {"__name__": "__main__"})
    return started if inspect.iscoroutine(started) else None


# Cells


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    skills = tmp_path_factory.mktemp("skills")
    skills.chmod(0o755)  # for the users of sessions of a server run by root
    skill = skills / "sales-report"
    (skill / "scripts").mkdir(parents=True)
    (skill / "SKILL.md").write_text(SKILL)
    for name in ("sales_report", "chart"):
        (skill / "scripts" / f"{name}.py").write_text(CODE)
    (policy,) = (block for block in of_page("docs/guides/privacy.md", "toml") if "[privacy]" in block.text)
    (folder / "policy.toml").write_text(policy.text)
    program = str(Path(__file__).with_name("guide_server.py"))
    servers = {name: {"command": sys.executable, "args": [program, name]} for name in ("files", "crm", "mail")}
    async with opened_runtime(
        default_environment,
        folder,
        mcp_servers=servers,
        policy=str(folder / "policy.toml"),
        skills_directory=str(skills),
        workspace="on",
    ) as runtime:
        yield runtime


async def answer(_context: Any, question: Any) -> ElicitResult:
    """Answer what a form asks for with the first thing that fits."""
    fields = question.requested_schema["properties"]
    return ElicitResult(action="accept", content={name: _fitting(field) for name, field in fields.items()})


def _fitting(field: dict[str, Any]) -> Any:
    if "enum" in field:
        return field["enum"][0]
    if "oneOf" in field:
        return field["oneOf"][0]["const"]
    return {"boolean": True, "integer": 1, "number": 1.5}.get(field.get("type", ""), "Oslo")


@pytest.mark.anyio
@pytest.mark.parametrize("page", CELLS)
async def test_cells_run_in_a_session_one_after_the_other(runtime: Runtime, page: str) -> None:
    blocks = [block for block in of_page(page, "python") if block not in PROGRAMS]
    async with connected(runtime, elicitation_callback=answer) as client:
        session = await client.new_session()
        claim = base64.b64encode(pdf_forms.claim()).decode()
        await client.fields("upload_file", session_id=session, name="claim.pdf", base64=claim)
        for block in blocks:
            if NEEDS_A_BROWSER in block.text.replace('with browser="playwright"', ""):
                compile(block.text, block.place, "exec")  # tests/surfaces/test_browser_forms.py has the browser
                continue
            result = await client.execute(block.text, session)
            assert result.status == "ok", f"{block.place}: {result.error}\n{result.traceback}"
            said = "".join(result.output)
            assert not re.search(r"No such file|not found|Traceback", said), f"{block.place}: {said}"
            if "send_message" in block.text:
                assert "[EMAIL_2]" in said


@pytest.mark.anyio
async def test_the_call_of_the_readme_answers_what_it_says(runtime: Runtime) -> None:
    call, said = (block for block in of_page("README.md", "json", "text") if "mcpServers" not in block.text)
    async with connected(runtime) as client:
        answered = text_of(await client.call("execute_code", **json.loads(call.text)))
    output, _, rest = said.text.partition("\n\n")
    assert answered.startswith(f"{output}\n")
    assert "session_id: " in answered
    assert "session_id: " in rest


def test_the_plugin_refuses_what_it_says() -> None:
    (snippet,) = of_page(PLUGINS, "python")
    names: dict[str, Any] = {}
    exec(compile(snippet.text, snippet.place, "exec"), names)
    judge = names["judge_tool_call"]

    def judged(server: str, to: str) -> Any:
        return judge(ToolCallFacts("session", "local", server, "send", {"to": to}))

    assert judged("mail", "ada@example.com") is None
    assert judged("files", "bob@elsewhere.test") is None
    assert judged("mail", "bob@elsewhere.test").decision == "deny"


def test_pages_whose_python_is_run_elsewhere_say_where() -> None:
    for reason in SHOWN_BY.values():
        assert (TESTS.parent / reason.split()[0]).exists()
