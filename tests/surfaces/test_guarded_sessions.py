"""Sessions under a policy, as clients see them: code that does not run or is asked about, output that is changed."""

import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from calls import ERAS, Caller, connected, opened_runtime, settings_for
from mcp.types import ElicitResult

from belljar.environments import Environment
from belljar.errors import CodeRejected, PolicyError
from belljar.executions.policy_check import SyntaxFault
from belljar.facts import ToolCallFacts
from belljar.models import ResultNotice
from belljar.policy.guardrails import read_guardrails
from belljar.python.local import Engine
from belljar.runtime import Runtime, open_runtime

pytestmark = pytest.mark.anyio

AWKWARD = Path(__file__).parents[1] / "toolbox" / "awkward_server.py"
POLICY = """
[[tools]]
match = "awkward.getItem"
decision = "deny"
reason = "items are ours"

[[tools]]
match = "awkward.pid"
decision = "ask"

[[tools]]
match = "awkward.add"
require = {expression = "arguments.a + arguments.b < 100", reason = "the sum is below 100"}
max_calls = 2

[limits]
max_execution_time = 30
max_memory_mb = 1024
allow_network_access = false

[[code]]
imports = ["subprocess"]
calls = ["os.system"]
shell = true
reason = "no other programs"

[[code]]
decision = "ask"
calls = ["os.remove"]

[[code]]
decision = "warn"
calls = ["eval"]

[[output]]
pattern = "sk-[a-z0-9]{8,}"
replace = "[key]"

[[output]]
text = "TOP SECRET"
withhold = true
"""


class Person:
    """Says yes or no, and remembers what to."""

    def __init__(self, action: str) -> None:
        self._action = action
        self.asked: list[str] = []

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        self.asked.append(params.message)
        return ElicitResult(action=self._action, content={} if self._action == "accept" else None)


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("guarded")
    policy = folder / "policy.toml"
    policy.write_text(POLICY)
    servers = {"awkward": {"command": sys.executable, "args": [str(AWKWARD)]}}
    chosen = {
        "mcp_servers": servers,
        "policy": str(policy),
        "egress": ["example.com:443"],
        "execution_timeout_s": 100,
        "memory_mb": 2048,
    }
    async with opened_runtime(default_environment, folder, fork_start=True, **chosen) as runtime:
        yield runtime


def decisions(runtime: Runtime) -> list[dict[str, Any]]:
    path = runtime.settings.data_directory / "decisions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_code_that_the_policy_denies_is_rejected_with_line_and_rule(runtime: Runtime, caller: Caller) -> None:
    kept = await caller.execute("x = 1")
    result = await caller.execute("x = 2\nimport subprocess", kept.session_id)
    assert (result.status, result.success, result.state) == ("rejected", False, "kept")
    assert result.error is not None
    assert result.error.startswith(
        "code-rejected: the code did not run: line 2: import of subprocess (code.1: no other"
    )
    assert (await caller.execute("x", kept.session_id)).result == "1"
    told = decisions(runtime)[-1]
    assert (told["execution"], told["line"], told["outcome"]) == (result.execution_id, 2, "denied")
    assert (await caller.get(result.execution_id)).status == "rejected"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("for i in range(3)\n    pass", "SyntaxError: expected ':' (line 1)"),
        ("x = 1\n y = 2", "IndentationError: unexpected indent (line 2)"),
        ("%%time\nimport os os", "SyntaxError: invalid syntax (line 2)"),
        ("open('ran', 'w')\nprint('a'", "SyntaxError: '(' was never closed (line 2)"),
    ],
)
async def test_a_syntax_error_stays_one_and_nothing_of_the_cell_runs(
    runtime: Runtime, caller: Caller, code: str, error: str
) -> None:
    kept = await caller.execute("x = 1")
    before = decisions(runtime)
    result = await caller.execute(code, kept.session_id)
    assert (result.status, result.error, result.state) == ("error", error, "kept")
    assert (result.traceback[-1], decisions(runtime)) == (error.rpartition(" (")[0], before)
    after = await caller.execute("import os\nx, os.path.exists('ran')", kept.session_id)
    assert after.result == "(1, False)"


async def test_what_only_a_newer_python_can_read_does_not_run_and_is_told_so(
    runtime: Runtime, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SyntaxFault, "is_of", staticmethod(lambda _version: False))
    result = await caller.execute("open('ran', 'w')\nprint(t'{1}' 2)")
    assert result.status == "rejected"
    assert "cannot be read as Python" in (result.error or "")
    assert "Write it in the syntax of Python 3." in (result.error or "")
    assert decisions(runtime)[-1]["outcome"] == "denied"
    assert (await caller.execute("import os\nos.path.exists('ran')", result.session_id)).result == "False"


async def test_after_a_person_declined_nobody_is_invited_to_another_way(runtime: Runtime) -> None:
    async with connected(runtime, elicitation_callback=Person("decline")) as caller:
        result = await caller.execute("import os\nos.remove('nothing')")
    assert "the person declined" in (result.error or "")
    assert "Do not try it another way" in (result.error or "")


async def test_names_are_followed_over_cells(caller: Caller) -> None:
    first = await caller.execute("import os as o\nrun = o")
    result = await caller.execute("run.system('true')", first.session_id)
    assert result.status == "rejected"


async def test_a_fork_knows_the_names_of_its_origin(runtime: Runtime, caller: Caller) -> None:
    if gap := runtime.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
        pytest.skip(f"sessions cannot be forked here: {gap}")
    first = await caller.execute("import os as o\nrun = o")
    fork = await caller.fields("fork_session", session_id=first.session_id)
    assert (await caller.execute("run.system('true')", fork["session_id"])).status == "rejected"


async def test_shell_commands_and_python_inside_of_magics_are_seen(caller: Caller, shared_session: str) -> None:
    assert (await caller.execute("!true", shared_session)).status == "rejected"
    assert (await caller.execute("%%time\nimport subprocess", shared_session)).status == "rejected"
    assert (await caller.execute("%time 1 + 1", shared_session)).status == "ok"


@pytest.mark.parametrize("era", ERAS)
async def test_the_person_is_asked_and_their_yes_lets_the_code_run(runtime: Runtime, era: str) -> None:
    person = Person("accept")
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute("open('f', 'w').close()\nimport os\nos.remove('f')\n'done'")
    assert (result.status, result.result) == ("ok", "'done'")
    (question,) = person.asked
    assert question.startswith("May this code run? line 3: os.remove (code.2)\n\nopen('f'")
    assert decisions(runtime)[-1]["outcome"] == "approved"


@pytest.mark.parametrize("era", ERAS)
async def test_a_no_keeps_the_code_from_running(runtime: Runtime, shared_session: str, era: str) -> None:
    async with connected(runtime, era, elicitation_callback=Person("decline")) as caller:
        result = await caller.execute("ran = True\nimport os\nos.remove('f')", shared_session)
        assert result.status == "rejected"
        assert "the person declined: line 3: os.remove (code.2)" in str(result.error)
        assert (await caller.execute("'ran' in globals()", shared_session)).result == "False"


async def test_where_nobody_can_be_asked_the_code_does_not_run(caller: Caller, shared_session: str) -> None:
    result = await caller.execute("import os\nos.remove('f')", shared_session)
    assert result.status == "rejected"
    assert "nobody could be asked" in str(result.error)


async def test_a_warning_is_said_and_the_code_runs(caller: Caller, shared_session: str) -> None:
    result = await caller.execute("eval('6 * 7')", shared_session)
    assert (result.status, result.result) == ("ok", "42")
    assert "[belljar: the policy warns: line 1: eval (code.3)]\n" in result.output


async def test_output_is_filtered_wherever_it_comes_from_and_however_it_is_cut(caller: Caller) -> None:
    code = """
import sys
for piece in ("a key: sk-abcd", "efgh1234", "\\n"):
    sys.stdout.write(piece)
    sys.stdout.flush()
print("sk-stderr0000", file=sys.stderr)
display({"text/plain": "sk-shown00000", "text/html": "<i>sk-shown00000</i>"}, raw=True)
raise ValueError("sk-raised00000")
"""
    result = await caller.execute(code)
    assert result.stdout == "a key: [key]\n"
    assert result.stderr == "[key]\n"
    assert result.error == "ValueError: [key]"
    # The traceback quotes the cell itself: that is filtered too.
    assert "sk-" not in result.model_dump_json()
    whole = await caller.read_text(f"execution://{result.execution_id}/output")
    assert "sk-" not in whole
    assert (await caller.execute("'sk-' + 'abcdefgh'", result.session_id)).result == "'[key]'"


async def test_output_is_withheld_from_the_place_on(caller: Caller, shared_session: str) -> None:
    result = await caller.execute("print('one')\nprint('TOP ' + 'SECRET')\nprint('two')\n3", shared_session)
    words = "[belljar: output withheld by output.2; the cell ran, show less of what it made]\n"
    assert (result.output, result.stdout, result.result) == (["one\n", words], "one\n", None)
    assert result.notices == [ResultNotice(text=words, at=1)]


CALLS = """
from servers.awkward import add, getItem
from toolbox import ToolError
said = []
for call in (lambda: getItem(), lambda: add(a=90, b=90), *[lambda: add(a=1, b=2)] * 3):
    try:
        said.append(call())
    except ToolError as error:
        said.append(str(error))
for line in said:
    print(line)
"""


async def test_calls_of_tools_are_judged_on_the_host(runtime: Runtime, caller: Caller) -> None:
    result = await caller.execute(CALLS)
    denied, over, first, second, third = result.stdout.splitlines()
    assert "items are ours (tools.1)" in denied
    assert "the sum is below 100 (tools.3)" in over
    assert first == second
    assert "3" in first
    assert "2 calls in this session are the most (tools.3)" in third
    told = [(line["tool"], line["outcome"]) for line in decisions(runtime)[-5:]]
    assert told == [("getItem", "denied"), ("add", "denied"), ("add", "allowed"), ("add", "allowed"), ("add", "denied")]


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(("action", "outcome"), [("accept", "approved"), ("decline", "declined")])
async def test_a_call_waits_for_the_persons_word(runtime: Runtime, era: str, action: str, outcome: str) -> None:
    person = Person(action)
    async with connected(runtime, era, elicitation_callback=person) as caller:
        result = await caller.execute("from servers.awkward import pid\npid()")
    assert (result.status == "ok") == (action == "accept")
    assert [question.splitlines()[0] for question in person.asked] == ["Allow awkward.pid with"]
    assert decisions(runtime)[-1]["outcome"] == outcome


async def test_limits_of_the_policy_make_the_settings_stricter(runtime: Runtime) -> None:
    settings = runtime.settings
    assert (settings.execution_timeout_s, settings.memory_mb, settings.egress) == (30, 1024, [])


async def test_the_python_api_raises_what_the_policy_refuses(runtime: Runtime) -> None:
    async with Engine(runtime.late_engine.get()).open_session() as session:
        with pytest.raises(CodeRejected, match="line 1: a shell command"):
            await session.execute("!true")


async def test_a_policy_that_is_not_in_order_stops_the_server(default_environment: Environment, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('strict = true\n\n[[tools]]\nmatch = "a.b"\ndecision = "perhaps"\n')
    with pytest.raises(PolicyError, match=r"line 5: tools\.1\.decision: it should be"):
        async with open_runtime(settings_for(default_environment, tmp_path, policy=str(policy))):
            pytest.fail("it started")


@pytest.mark.parametrize(
    ("limits", "chosen", "expected"),
    [
        ("", {}, (600, 2048, ["b.example.com:80"])),
        ("max_execution_time = 900", {}, (600, 2048, ["b.example.com:80"])),
        ("max_memory_mb = 128", {"memory_mb": None}, (600, 128, ["b.example.com:80"])),
        ('allowed_networks = ["a.example.com"]', {}, (600, 2048, ["a.example.com:443"])),
        ("", {"allow_network_access": False}, (600, 2048, [])),
        ('allowed_networks = ["a.example.com"]', {"allow_network_access": False}, (600, 2048, [])),
    ],
)
async def test_limits_meet_settings(
    default_environment: Environment, tmp_path: Path, limits: str, chosen: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f"[limits]\n{limits}\n")
    settings = settings_for(default_environment, tmp_path, policy=str(policy), egress=["b.example.com:80"], **chosen)
    limited = read_guardrails(settings).settings
    assert (limited.execution_timeout_s, limited.memory_mb, limited.egress) == expected


async def test_guardrails_that_are_switched_off_guard_nothing(default_environment: Environment, tmp_path: Path) -> None:
    chosen = {"blocked_patterns": ["os.system", "open(_, 'w*')"], "guardrails_strict": True}
    guarded = read_guardrails(settings_for(default_environment, tmp_path, **chosen)).guard("s", "p", tmp_path)
    code = "import os\nos.system('ls')\nopen('f', 'w')"
    call = ToolCallFacts("s", "p", "a", "b", {}, read_only=True, destructive=False)
    assert [finding.line for finding in (await guarded.examine(code, "")).findings] == [2, 3]
    assert (await guarded.judge(call)).decision == "deny"
    off = read_guardrails(settings_for(default_environment, tmp_path, guardrails=False, **chosen))
    free = off.guard("s", "p", tmp_path)
    assert (await free.examine(code, "")).decision == "allow"
    assert (await free.judge(call)).decision == "allow"
