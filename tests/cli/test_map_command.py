"""`belljar map`: lines of code in, lines of results out, and what is started again goes on where it was."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from belljar.environments import Environment
from belljar.sandboxes.namespace.provider import NamespaceProvider
from ran_commands import Outcome
from waiting import until_blocking


@pytest.fixture(autouse=True)
def settings(place: Path, default_environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that tests share, and no module imported ahead."""
    if gap := NamespaceProvider().no_nesting_reason():
        pytest.skip(f"sessions cannot be forked here: {gap}")
    monkeypatch.setenv("BELLJAR_ENVIRONMENT", str(default_environment.python))
    monkeypatch.setenv("BELLJAR_PRELOAD", "[]")
    monkeypatch.setenv("BELLJAR_POOL_SIZE", "0")


def write_codes(place: Path, *codes: Any) -> None:
    (place / "codes.jsonl").write_text("".join(f"{json.dumps(code)}\n" for code in codes))


def lines(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]


def test_each_line_has_a_result_and_a_second_run_asks_for_nothing(belljar: Callable[..., Outcome], place: Path):
    write_codes(place, "1 + 1", {"code": "1 / 0"}, "print('said')")
    told = belljar("map", "codes.jsonl", "--out", "out.jsonl")
    assert told.code == 0, told.err
    found = {line["index"]: line for line in lines(place)}
    assert (found[0]["result"], found[1]["status"], found[2]["stdout"]) == ("2", "error", "said\n")
    assert sorted(path.name for path in place.iterdir()) == ["codes.jsonl", "out.jsonl"]
    before = (place / "out.jsonl").read_bytes()
    assert "3 of 3 have their results" in belljar("map", "codes.jsonl", "--out", "out.jsonl").err
    assert (place / "out.jsonl").read_bytes() == before


def test_one_that_was_killed_goes_on_and_runs_nothing_twice(
    belljar: Callable[..., Outcome], place: Path, tmp_path: Path
):
    # Each leaves its mark where the next server can count it: in the journal, whose executions are not shared.
    write_codes(place, *(f"import time, uuid; time.sleep(0.3); print({n}, uuid.uuid4())" for n in range(8)))
    command = [sys.executable, "-m", "belljar", "map", "codes.jsonl", "--out", "out.jsonl", "--at-once", "2"]
    with subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE) as running:
        until_blocking(lambda: (place / "out.jsonl").exists() and len(lines_so_far(place)) >= 2)
        running.send_signal(signal.SIGKILL)
    first = {line["index"]: line for line in lines_so_far(place)}
    # As if it had been killed in the middle of a line.
    with (place / "out.jsonl").open("a") as out:
        out.write('{"success": tr')
    told = belljar("map", "codes.jsonl", "--out", "out.jsonl")
    assert told.code == 0, told.err
    found = lines(place)
    assert sorted(line["index"] for line in found) == [*range(8)]
    by_index = {line["index"]: line for line in found}
    assert {index: by_index[index] for index in first} == first
    lost = [line for line in found if line.get("state") == "lost"]
    assert len(lost) <= 2
    assert all("its server ended without notice" in line["cause"] for line in lost)
    again = belljar("map", "codes.jsonl", "--out", "out.jsonl", "--retry-lost")
    assert again.code == 0, again.err
    latest = {line["index"]: line for line in lines(place)}
    assert [latest[index]["stdout"].split()[0] for index in range(8)] == [*map(str, range(8))]
    assert len(lines(place)) == 8 + len(lost)


def lines_so_far(place: Path) -> list[dict[str, Any]]:
    text = (place / "out.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def test_what_cannot_be_is_refused_and_touches_nothing(belljar: Callable[..., Outcome], place: Path):
    write_codes(place, "1")
    (place / "mine.txt").write_text("mine\n")
    (place / "link").symlink_to("mine.txt")
    os.mkfifo(place / "pipe")
    os.mkfifo(place / "noted.map")
    (place / "wrong.jsonl").write_text('{"code": 1}\n')
    (place / "torn.jsonl").write_text('{"code": \n')
    (place / "empty.jsonl").write_text("\n")
    for arguments, said in [
        (("codes.jsonl", "--out", "link"), "link is a link"),
        (("codes.jsonl", "--out", "pipe"), "pipe is no regular file"),
        (("codes.jsonl", "--out", "noted"), "noted.map is no regular file"),
        (("codes.jsonl", "--out", "mine.txt"), "no results of a map"),
        (("wrong.jsonl", "--out", "out.jsonl"), "line 1 of wrong.jsonl has no code"),
        (("torn.jsonl", "--out", "out.jsonl"), "line 1 of torn.jsonl is no JSON"),
        (("empty.jsonl", "--out", "out.jsonl"), "has no pieces"),
        (("nowhere.jsonl", "--out", "out.jsonl"), "cannot be read"),
        (("codes.jsonl", "--out", "nowhere/out.jsonl"), "cannot be written"),
        (("codes.jsonl", "--out", "out.jsonl", "--session", "nothing"), "no running server answers"),
    ]:
        told = belljar("map", *arguments)
        assert (told.code != 0, said in told.err) == (True, True), told.err
    assert (place / "mine.txt").read_text() == "mine\n"
    assert (place / "link").readlink() == Path("mine.txt")


def test_results_of_other_code_are_not_gone_on_with(belljar: Callable[..., Outcome], place: Path):
    write_codes(place, "1", "2")
    assert belljar("map", "codes.jsonl", "--out", "out.jsonl").code == 0
    before = (place / "out.jsonl").read_bytes()
    write_codes(place, "1", "3")
    told = belljar("map", "codes.jsonl", "--out", "out.jsonl")
    assert told.code != 0
    assert "has the results of other pieces than those in codes.jsonl" in told.err
    assert (place / "out.jsonl").read_bytes() == before
