"""Skills as clients and sessions use them: saved, checked, found, imported, served with digests, reviewed."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from calls import ERAS, Caller, connected, opened_runtime, text_of
from mcp import MCPError
from mcp.types import INVALID_PARAMS
from tool_cells import runtime_with_tools

from belljar.environments import Environment
from belljar.runtime import Runtime
from belljar.skills.format import write_main
from skill_clients import accept, ask, content, listed

pytestmark = pytest.mark.anyio

REPORT = '''"""Reports."""
from collections import Counter

def monthly(rows):
    return Counter(row["month"] for row in rows)
'''


def write_skill(folder: Path, name: str, description: str, **files: str | bytes) -> None:
    place = folder / name
    for path, data in {"SKILL.md": write_main(place.name, description, "# How\n"), **files}.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(data if isinstance(data, bytes) else data.encode())


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's folder, open to the users of sessions."""
    folder = tmp_path_factory.mktemp("operator") / "skills"
    files = {"scripts/page.py": "import helper\ndef turn(): return helper.pages\n", "scripts/helper.py": "pages = 3\n"}
    picture = bytes(range(256))
    write_skill(folder, "pdf-pages", "Turns pages of PDF files.", **files, **{"assets/a b é.png": picture})
    write_skill(folder, "group/mail-merge", "Writes letters.", **{"scripts/mail_merge.py": "def go(): return 'gone'\n"})
    write_skill(folder, "words", "Only words.", **{"references/deep/er.md": "# Deeper\r\n"})
    (folder / "greeting.py").write_text('"""Greets people."""\ndef hello(): return "hello"\n')
    for place in (folder.parent, folder, *folder.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory, operator: Path
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    chosen = {"skills_directory": str(operator), "pool_size": 1, "fork_start": True}
    async with runtime_with_tools(default_environment, folder, **chosen) as runtime:
        yield runtime


async def test_code_that_worked_is_saved_found_and_imported_in_every_kind_of_session(
    caller: Caller, shared_session: str
):
    saved = await caller.fields(
        "save_skill",
        name="sales-report",
        description="Counts sales a month. Use it for monthly reports.",
        code=REPORT,
        example="from skills.sales_report import monthly\nassert monthly([{'month': 'may'}])['may'] == 1",
        session_id=shared_session,
    )
    assert (saved["state"], saved["module"]) == ("approved", "skills.sales_report")
    assert saved["files"] == ["SKILL.md", "scripts/sales_report.py"]
    found = (await caller.fields("search_skills", query="monthly sales"))["skills"]
    assert found[0]["name"] == "sales-report"
    code = "from skills.sales_report import monthly\nmonthly([{'month': 'may'}])"
    # An earlier session, one of the pool, and a fork, whose folders differ.
    assert (await caller.execute(code, shared_session)).result == "Counter({'may': 1})"
    fork = (await caller.fields("fork_session", session_id=shared_session))["session_id"]
    assert (
        await caller.execute("import skills.sales_report.sales_report as m\nm.__doc__", fork)
    ).result == "'Reports.'"
    fresh = await caller.execute(f"{code}", "")
    assert fresh.result == "Counter({'may': 1})"
    shown = await caller.execute("!ls skills skills/sales-report; cat skills/sales-report/SKILL.md", fresh.session_id)
    assert "sales-report" in shown.stdout
    assert "pdf-pages" in shown.stdout
    assert "name: sales-report" in shown.stdout
    refused = await caller.execute("open('skills/sales-report/scripts/sales_report.py', 'w')", fresh.session_id)
    assert "Read-only file system" in str(refused.error)


async def test_the_operators_skills_are_imported_with_hyphens_as_underscores(caller: Caller, shared_session: str):
    code = (
        "from skills.pdf_pages import helper\nfrom skills.group.mail_merge import go\n"
        "from skills.greeting import hello\n(helper.pages, go(), hello())"
    )
    assert (await caller.execute(code, shared_session)).result == "(3, 'gone', 'hello')"
    # A script that expects its folder on the path runs as such.
    run = "!cd skills/pdf-pages/scripts && python -c 'import page; print(page.turn())'"
    assert (await caller.execute(run, shared_session)).stdout.strip() == "3"
    missing = await caller.execute("from skills.pdf_pages import nothing", shared_session)
    assert "cannot import name 'nothing'" in str(missing.error)
    missing = await caller.execute("import skills.pdf_pages\nskills.pdf_pages.nothing", shared_session)
    assert "has no 'nothing'; it has helper, page" in str(missing.error)


async def test_what_the_operator_adds_is_seen_by_the_next_cell(caller: Caller, shared_session: str, operator: Path):
    write_skill(operator, "late-one", "Comes late.", **{"scripts/late_one.py": "x = 5\n"})
    for place in (operator / "late-one").rglob("*"):
        place.chmod(0o755 if place.is_dir() else 0o644)
    (operator / "late-one").chmod(0o755)
    assert (await caller.execute("from skills.late_one import x\nx", shared_session)).result == "5"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"code": "def broken(:\n"}, "it does not compile: SyntaxError: invalid syntax (scripts/tidy.py, line 1)"),
        (
            {"code": "\n\nimport no_such_module\n"},
            "it does not import: ModuleNotFoundError: No module named 'no_such_module' (scripts/tidy.py, line 3)",
        ),
        (
            {"code": "def f():\n    return 1 / 0\n", "example": "from skills.tidy import f\nf()"},
            "its example fails: ZeroDivisionError: division by zero (scripts/tidy.py, line 2)",
        ),
        (
            {"code": "def f(): return 1\n", "example": "from skills.tidy import f\nassert f() == 2"},
            "its example fails: AssertionError (line 2 of the example)",
        ),
        ({"code": "import os\nos._exit(3)\n"}, "it does not import: "),
        ({"name": "Tidy Up", "code": "1"}, "the name 'Tidy Up' is not one of the Agent Skills format"),
        ({"name": "pdf-pages", "code": "1"}, "the operator has a skill 'pdf-pages' already"),
        ({"description": "x" * 1025, "code": "1"}, "description has 1,025 characters"),
        ({"description": " ", "code": "1"}, "description is missing or empty"),
        ({}, "has neither code nor files"),
        ({"files": {"../../etc/cron.d/x": "1"}}, "is no path of a file in a skill"),
        ({"files": {"SKILL.md": "---\n- a\n---\n"}}, "SKILL.md, line 2: the front matter is no mapping"),
        ({"files": {"SKILL.md": "---\na: &a [1]\nb: *a\n---\n"}}, "SKILL.md, line 2: anchors and aliases"),
        ({"files": {f"{number}.md": "" for number in range(600)}}, "the most is 512"),
        ({"code": "1", "session_id": "f" * 32}, "does not exist"),
        ({"folder": "nowhere"}, "folder is one of a session"),
    ],
)
async def test_a_skill_that_is_not_in_order_is_refused_and_nothing_is_stored(
    caller: Caller, runtime: Runtime, arguments: dict[str, object], told: str
):
    before = (await caller.fields("list_sessions"))["sessions"]
    text = await caller.refusal("save_skill", **{"name": "tidy", "description": "Tidies.", **arguments})
    assert told in text
    assert runtime.skills is not None
    assert "tidy" not in runtime.skills.saved("local")
    assert len((await caller.fields("list_sessions"))["sessions"]) == len(before)


async def test_a_folder_of_the_session_becomes_a_skill_with_its_servers_on_record(caller: Caller, shared_session: str):
    code = (
        "import pathlib\nplace = pathlib.Path('work/scripts'); place.mkdir(parents=True)\n"
        "(place / 'adding.py').write_text('from servers.awkward import add\\ndef go(): return add(1, 2)\\n')\n"
        "(place.parent / 'data.bin').write_bytes(bytes(range(256)))"
    )
    assert (await caller.execute(code, shared_session)).success
    saved = await caller.fields(
        "save_skill",
        name="adding-up",
        description="Adds with the awkward server.",
        folder="work",
        example="from skills.adding_up import go\nassert go() == {'sum': 3}",
        session_id=shared_session,
    )
    assert saved["servers"] == ["awkward"]
    assert saved["files"] == ["SKILL.md", "data.bin", "scripts/adding.py"]
    assert (await caller.execute("import toolbox\ntoolbox.search('adds up')", shared_session)).success
    text = await caller.execute("print(toolbox.search('adds with awkward'))", shared_session)
    assert "skills/adding-up: Adds with the awkward server." in text.stdout


@pytest.mark.parametrize("era", ERAS)
async def test_a_client_that_verifies_everything_accepts_every_skill(runtime: Runtime, era: str):
    async with connected(runtime, era) as caller:
        skills = {entry["frontmatter"]["name"]: entry for entry in await listed(caller.client)}
        assert {"pdf-pages", "mail-merge", "words"} <= {*skills}
        assert skills["mail-merge"]["uri"] == "skill://group/mail-merge/SKILL.md"
        for entry in skills.values():
            await accept(caller.client, entry)
        assert skills["words"]["frontmatter"]["description"] == "Only words."
        for method, uri in (
            ("skills/get", "skill://nothing/SKILL.md"),
            ("skills/get", "skill://pdf-pages/scripts/page.py"),
            ("skills/get", "skill://greeting.py/SKILL.md"),
            ("resources/directory/read", "skill://pdf-pages/SKILL.md"),
            ("resources/directory/read", "skill://pdf-pages/nowhere"),
            ("resources/directory/read", "file:///etc"),
        ):
            with pytest.raises(MCPError) as caught:
                await ask(caller.client, method, uri=uri)
            assert caught.value.error.code == INVALID_PARAMS, (method, uri)
        for uri in ("skill://pdf-pages/../../etc/passwd", "skill://pdf-pages/none", "skill://pdf-pages/%2e%2e/x"):
            with pytest.raises(MCPError) as caught:
                await content(caller.client, uri)
            assert caught.value.error.code == INVALID_PARAMS, uri
        with pytest.raises(MCPError):
            await ask(caller.client, "skills/list", cursor="x" * 100)


async def test_the_extension_is_declared_and_each_skill_is_a_prompt_too(runtime: Runtime):
    async with connected(runtime, "auto") as caller:
        extensions = caller.client.server_capabilities.extensions or {}
        assert extensions["io.modelcontextprotocol/skills"] == {"directoryRead": True}
        prompts = {prompt.name: prompt.description for prompt in (await caller.client.list_prompts()).prompts}
        assert prompts["words"] == "Only words."
        assert "greeting.py" not in prompts
        (message,) = (await caller.client.get_prompt("group/mail-merge")).messages
        assert "skills/group/mail-merge/" in message.content.text
        assert "# How" in message.content.text
        with pytest.raises(MCPError):
            await caller.client.get_prompt("nothing")


async def test_no_skill_costs_a_token_before_it_is_searched(runtime: Runtime):
    async with connected(runtime) as caller:
        tools = (await caller.client.list_tools()).tools
        seen = json.dumps([tool.model_dump(mode="json") for tool in tools]) + str(caller.client.instructions)
        assert "pdf-pages" not in seen
        assert "Turns pages" not in seen


async def test_under_review_only_the_session_that_saved_it_sees_a_skill(
    default_environment: Environment, tmp_path: Path
):
    chosen = {"skills": "on", "skills_review": True, "pool_size": 0, "blocked_patterns": ["subprocess"]}
    async with opened_runtime(default_environment, tmp_path, **chosen) as runtime, connected(runtime) as caller:
        own, other = await caller.new_session(), await caller.new_session()
        hidden = {"name": "shell", "description": "Runs.", "files": {"scripts/a.py": "x = 1\nimport subprocess\n"}}
        told = await caller.refusal("save_skill", **hidden)
        assert "the policy does not allow scripts/a.py: line 2: import of subprocess" in told
        answer = await caller.call("save_skill", name="tidy", description="Tidies.", code="x = 1\n", session_id=own)
        assert "A person has to approve it" in text_of(answer)
        code = "from skills.tidy import x\nx"
        assert (await caller.execute(code, own)).result == "1"
        assert "No module named 'skills.tidy'" in str((await caller.execute(code, other)).error)
        assert (await caller.fields("search_skills", query="tidy"))["skills"] == []
        assert await listed(caller.client) == []
        assert runtime.skills is not None
        assert runtime.skills.store is not None
        runtime.skills.store.of("local").approve("tidy")
        assert (await caller.execute(code, other)).result == "1"
        assert [entry["uri"] for entry in await listed(caller.client)] == ["skill://tidy/SKILL.md"]


async def test_without_skills_nothing_of_them_is_there(default_environment: Environment, tmp_path: Path):
    async with opened_runtime(default_environment, tmp_path, pool_size=0) as runtime, connected(runtime) as caller:
        assert not [tool for tool in (await caller.client.list_tools()).tools if "skill" in tool.name]
        assert "io.modelcontextprotocol/skills" not in (caller.client.server_capabilities.extensions or {})
        assert "No module named 'skills'" in str((await caller.execute("import skills")).error)
