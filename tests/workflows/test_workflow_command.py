"""`belljar workflow` as a person uses it: exit status, stdout for data, stderr for the rest."""

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from workflow_texts import code, form, tool, workflow

from belljar.environments import Environment
from waiting import until_blocking

Command = Callable[..., Any]
LEDGER = Path(__file__).parents[1] / "ledger_server.py"
ANOTHER_SYSTEMS = """
workflows:
  - name: prices
    description: Two steps and a file
    version: "1.0"
    steps:
      - name: gather
        type: code_execution
        config:
          code: |
            prices = {"pear": 3, "plum": 5}
            print(f"{len(prices)} prices")
        on_error: skip

      - name: keep
        type: code_execution
        config:
          code: |
            import json
            with open("workspace/prices.json", "w") as file:
                json.dump(prices, file)
            len(prices)
        on_error: stop

    variables:
      output_dir: "./workspace"

    guardrails:
      enabled: true
      strict_mode: false

  - name: letters
    version: "1.0"
    steps:
      - name: write
        type: code_execution
        config:
          code: |
            who = "ann@example.com"
            print("Dear", who)
            who
    guardrails:
      enabled: true
      pii_detection: true
      tokenization: true
"""
"""Two workflows with the keys that another system's files have."""


@pytest.fixture
def command(
    belljar: Command, place: Path, default_environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> Command:
    """The command in this process, with a data directory of its own."""
    for path in (place, *place.parents[:1]):
        path.chmod(0o755)
    monkeypatch.setenv("BELLJAR_ENVIRONMENT", str(default_environment.python))
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(place / "data"))
    monkeypatch.setenv("BELLJAR_LOG_LEVEL", "ERROR")
    return belljar


def test_a_run_prints_its_value_and_waits_for_an_answer(command: Command, place: Path):
    steps = [code("a", "print('working')\nkept = n * 2\nkept"), form("ask", "Double {{ a.result }}?")]
    path = place / "w.yaml"
    path.write_text(workflow(*steps, code("b", "kept * 2"), name="doubling", variables={"n": 1}))
    ran = command("workflow", "run", "w.yaml", "--var", "n=4")
    assert (ran.code, ran.out) == (3, "")
    assert "working\n" in ran.err
    assert "waits for a person (ask): Double 8?" in ran.err
    (listed,) = json.loads(command("workflow", "list", "--json").out)
    assert {key: listed[key] for key in ("name", "state", "step")} == {
        "name": "doubling",
        "state": "waiting",
        "step": "ask",
    }
    assert listed["question"]["message"] == "Double 8?"
    path.write_text(workflow(*steps, code("b", "kept * 3"), name="doubling", variables={"n": 1}))
    answered = command("workflow", "answer", listed["run"][:8])
    assert (answered.code, answered.out) == (0, "16\n")
    assert "▸ b" in answered.err
    assert "▸ a" not in answered.err
    shown = command("workflow", "show", listed["run"])
    assert "of doubling: done" in shown.out
    assert "b: done, 16" in shown.out
    again = command("workflow", "answer", listed["run"])
    assert again.code == 2
    assert "waits for no answer: it is done" in again.err


def test_a_run_that_asks_before_its_first_cell_goes_on_in_another_command(command: Command, place: Path):
    (place / "w.yaml").write_text(workflow(form("ask", "Go on?"), code("a", "20 + 1")))
    assert command("workflow", "run", "w.yaml").code == 3
    (listed,) = json.loads(command("workflow", "list", "--json").out)
    answered = command("workflow", "answer", listed["run"])
    assert (answered.code, answered.out) == (0, "21\n"), answered.err


def test_declined_expired_and_answered_twice_are_told_apart_by_the_command(command: Command, place: Path):
    (place / "ask.yaml").write_text(workflow(form("ask", "Go on?"), form("more", "And on?"), name="asks"))
    command("workflow", "run", "ask.yaml")
    (listed,) = json.loads(command("workflow", "list", "--json").out)
    assert command("workflow", "answer", listed["run"], "--step", "ask").code == 3
    again = command("workflow", "answer", listed["run"], "--step", "ask")
    assert again.code == 2
    assert "question of step ask was answered already" in again.err
    declined = command("workflow", "answer", listed["run"], "--decline")
    assert declined.code not in (0, 3)
    assert "step more was declined" in declined.err
    assert "it is stopped" in command("workflow", "answer", listed["run"]).err

    (place / "quick.yaml").write_text(workflow(form("ask", "Quick?", expires_s=0.01), name="quick"))
    command("workflow", "run", "quick.yaml")
    (quick,) = (run for run in json.loads(command("workflow", "list", "--json").out) if run["name"] == "quick")
    expired = command("workflow", "answer", quick["run"])
    assert expired.code == 2
    assert "question of step ask expired at" in expired.err or "nobody answered within 0.01 s" in expired.err


def test_a_cell_that_asks_in_its_middle_is_answered_from_another_terminal(command: Command, place: Path):
    (place / "w.yaml").write_text(workflow(code("ask", "n = 2\nn * int(input('How often? '))"), name="asks"))
    arguments = [sys.executable, "-m", "belljar", "workflow", "run", "w.yaml"]
    process = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:

        def waiting() -> Any:
            answer = command("workflow", "list", "--json")
            # The journal may be half made.
            return answer.code == 0 and [run for run in json.loads(answer.out) if run["question"]]

        (listed,) = until_blocking(waiting)
        shown = command("workflow", "show", listed["run"]).out
        assert f"belljar workflow answer {listed['run']} answer=… goes on" in shown
        answered = command("workflow", "answer", listed["run"], "answer=21")
        assert (answered.code, answered.err) == (0, "the server that drives the run goes on with it\n")
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (0, "42\n"), err
    assert "waits for a person (ask): How often?" in err


def test_a_failed_run_is_resumed_and_a_changed_text_is_refused(command: Command, place: Path):
    path = place / "w.yaml"
    path.write_text(workflow(code("a", "n = 1\nn"), code("b", "n / 0")))
    failed = command("workflow", "run", "w.yaml")
    assert failed.code == 1
    assert "failed: step b: ZeroDivisionError" in failed.err
    path.write_text(workflow(code("a", "n = 1\nn"), code("b", "n / 4")))
    refused = command("workflow", "resume", "--last")
    assert refused.code == 2
    assert "step b (line" in refused.err
    resumed = command("workflow", "resume", "--last", "--changed")
    assert (resumed.code, resumed.out) == (0, "0.25\n")
    assert "▸ a" not in resumed.err


def test_problems_are_told_with_file_and_line(command: Command, place: Path):
    (place / "w.yaml").write_text("name: x\nsteps:\n  - name: a\n    type: code_execution\n    config: {code: 'x ='}\n")
    checked = command("workflow", "validate", "w.yaml")
    assert checked.code == 2
    assert "w.yaml:5: step a: line 1 of its code is no Python" in checked.err
    assert command("workflow", "run", "w.yaml").code == 2
    assert command("workflow", "list", "--json").out == "[]\n"
    assert command("workflow", "run", "missing.yaml").code == 2
    assert "no run to go on with" in command("workflow", "resume", "--last").err


def test_the_schema_and_the_graph_are_printed(command: Command, place: Path):
    assert json.loads(command("workflow", "schema").out)["title"] == "belljar workflow"
    (place / "w.yaml").write_text(workflow(code("a", "1")))
    assert command("workflow", "graph", "w.yaml").out.startswith("flowchart TD\n")
    assert command("workflow", "graph", "w.yaml", "--svg").out.startswith("<svg")


def test_a_run_that_was_interrupted_goes_on_where_it_was(command: Command, place: Path):
    gate = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nkept + 1"
    (place / "w.yaml").write_text(workflow(code("a", "kept = 41"), code("b", gate, repeat=True)))
    program = [sys.executable, "-m", "belljar.workflows", "--workflow", "w.yaml"]
    with subprocess.Popen(program, cwd=place, env={**os.environ}, stderr=subprocess.DEVNULL) as process:
        journal = place / "data" / "journal.sqlite"
        until_blocking(lambda: journal.exists() and _is_at(journal, "b"))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    (listed,) = json.loads(command("workflow", "list", "--json").out)
    assert (listed["state"], listed["step"]) == ("interrupted", "b")
    (session,) = (place / "data" / "sessions").glob("*/workspace")
    (session / "go").touch()
    resumed = command("workflow", "resume", listed["run"])
    assert (resumed.code, resumed.out) == (0, "42\n")


def _is_at(journal: Path, step: str) -> bool:
    query = "SELECT 1 FROM steps JOIN executions ON execution_id = id WHERE path = ? AND started_at IS NOT NULL"
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as reader:
        try:
            return reader.execute(query, (step,)).fetchone() is not None
        except sqlite3.OperationalError:
            return False  # the tables are being made


def test_every_command_obeys_a_trusted_file_of_variables(
    command: Command, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("BLOCKED_PATTERNS", "")  # so that what the file sets is undone too
    monkeypatch.delenv("BLOCKED_PATTERNS")
    file = place / ".env"
    file.write_text("BLOCKED_PATTERNS=os.system\n")
    source = "import os\nos.system('true')"
    (place / "w.yaml").write_text(workflow(code("a", source)))
    commands = [("run", "-c", source), ("workflow", "validate", "w.yaml"), ("workflow", "run", "w.yaml")]
    assert [command(*each).code for each in commands] == [0, 0, 0]
    assert f"belljar trust {file}" in caplog.text
    command("trust", ".env")
    assert f"read {file}: BLOCKED_PATTERNS\n" in command("config").err
    for each in commands:
        monkeypatch.delenv("BLOCKED_PATTERNS")
        refused = command(*each)
        assert refused.code != 0
        assert "os.system" in refused.err
    monkeypatch.delenv("BLOCKED_PATTERNS")
    assert '["os.system"]' in command("config").out


def by_module(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "belljar.workflows", *arguments]
    return subprocess.run(program, cwd=place, env={**os.environ}, capture_output=True, text=True, timeout=120)


def test_a_file_of_another_system_runs_and_its_workspace_is_a_folder_here(command: Command, place: Path):
    (place / "workflows.yaml").write_text(ANOTHER_SYSTEMS)
    checked = command("workflow", "validate", "workflows.yaml")
    assert (checked.code, checked.err) == (0, "")
    assert [line.partition("in order: ")[2] for line in checked.out.splitlines()] == [
        "prices, 2 steps",
        "letters, 1 step",
    ]
    several = by_module(place, "--workflow", "workflows.yaml")
    assert several.returncode == 2
    assert "Name one of them, with --name in a command: prices, letters" in several.stderr
    ran = by_module(place, "--workflow", "workflows.yaml", "--name", "prices")
    assert (ran.returncode, ran.stdout) == (0, "2\n"), ran.stderr
    assert "saved in workspace/: prices.json\n" in ran.stderr
    assert json.loads((place / "workspace" / "prices.json").read_text()) == {"pear": 3, "plum": 5}
    letters = by_module(place, "--workflow", "workflows.yaml", "--name", "letters")
    assert (letters.returncode, letters.stdout) == (0, "[EMAIL_1]\n"), letters.stderr
    assert "Dear [EMAIL_1]\n" in letters.stderr
    assert "saved" not in letters.stderr


def test_a_later_run_finds_what_an_earlier_one_left_and_replaces_it_here(command: Command, place: Path):
    count = """
from pathlib import Path
file = Path("workspace/deep/count.txt")
file.parent.mkdir(exist_ok=True)
count = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(count))
Path("workspace/.hidden").write_text("")
count
"""
    (place / "w.yaml").write_text(workflow(code("a", count), form("ask", "Go on?")))
    (place / "workspace").mkdir()
    (place / "workspace" / ".gitkeep").touch()
    for number in ("1", "2"):
        ran = command("workflow", "run", "w.yaml")
        assert ran.code == 3, ran.err
        assert "saved in workspace/: deep/count.txt\n" in ran.err
        assert (place / "workspace" / "deep" / "count.txt").read_text() == number
    assert not (place / "workspace" / ".hidden").exists()


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_no_file_of_a_run_gets_among_the_persons_own(
    command: Command, place: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BELLJAR_DOWNLOAD_DIRECTORY", str(place / "downloads"))
    own = place / "own"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    here = place / "workspace"
    if kind == "folder":
        own.rename(own := here)
    elif kind == "link":
        here.symlink_to(own)
    else:
        here.write_text("mine")
    (place / "w.yaml").write_text(workflow(code("a", "open('workspace/notes.txt', 'w').write('theirs')")))
    ran = command("workflow", "run", "w.yaml")
    assert ran.code == 0, ran.err
    assert (own / "notes.txt").read_text() == "mine"
    assert [path.name for path in own.iterdir()] == ["notes.txt"]
    assert kind != "file" or here.read_text() == "mine"
    (saved,) = (place / "downloads").glob("*/notes.txt")
    assert saved.read_text() == "theirs"
    assert f"saved in {saved.parent}, because workspace here " in ran.err


def test_guardrails_that_do_less_than_they_say_are_told(command: Command, place: Path):
    guardrails = {
        "enabled": True,
        "pii_detection": True,
        "tokenization": False,
        "content_filtering": True,
        "rate_limiting": True,
        "security_checks": False,
    }
    (place / "w.yaml").write_text(workflow(code("a", "1", guardrails={"enabled": False}), guardrails=guardrails))
    for each in ("validate", "run"):
        told = command("workflow", each, "w.yaml")
        assert told.code == 0
        notes = [line for line in told.err.splitlines() if line.startswith("note: w.yaml:")]
        named = (
            "content_filtering does nothing",
            "rate_limiting does nothing",
            "tokenization: false",
            "enabled: false",
        )
        assert len(notes) == len(named)
        assert all(text in note for text, note in zip(named, notes, strict=True))


def test_the_servers_of_tool_steps_are_named_with_each_command(command: Command, place: Path):
    servers = {"ledger": {"command": sys.executable, "args": [str(LEDGER), str(place / "ledger")]}}
    (place / "servers of mine.json").write_text(json.dumps({"mcpServers": servers}))
    (place / "w.yaml").write_text(workflow(form("ask", "Write?"), tool("put", "write", text="x")))
    missing = command("workflow", "validate", "w.yaml")
    assert missing.code == 2
    assert "Start belljar with --mcp-config FILE" in missing.err
    option = ("--mcp-config", "servers of mine.json")
    assert command("workflow", "validate", "w.yaml", *option).code == 0
    asked = command("workflow", "run", "w.yaml", *option)
    assert asked.code == 3
    (hint,) = [line for line in asked.err.splitlines() if line.startswith("belljar workflow answer ")]
    answered = command(*shlex.split(hint.removeprefix("belljar ").removesuffix(" goes on with it")))
    assert (answered.code, answered.out) == (0, "written x\n"), answered.err
    assert (place / "ledger").read_text() == "write x\n"
