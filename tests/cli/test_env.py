"""`belljar env`, against an index of our own."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ran_sessions import ran

from belljar.cli import progress
from belljar.environments import Environment
from belljar.supervisor import Deposit, open_supervisor
from live_server import live_server
from local_index import LocalIndex, add_support
from shared_environment import share_support
from trusted_settings import write_trusted

Belljar = Callable[..., Any]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("env") / "venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in ("ipython-9.0", "cloudpickle-3.0"):
        (packages / f"{name}.dist-info").mkdir()
    return folder


@pytest.fixture
def town(place: Path, tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings with one environment of each fate; the data directory."""
    (tmp_path / "index").mkdir()
    index = LocalIndex(tmp_path / "index")
    add_support(index)
    index.add_wheel("house", "1.0", {"house.py": ""})
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    write_trusted(
        f"data_directory = '{tmp_path / 'data'}'\nenvironment = 'mine'\n"
        f"[environments.mine]\nkind = 'venv'\npath = '{venv}'\n"
        "[environments.made]\nkind = 'managed'\nrequirements = ['house']\n"
        "[environments.gone]\nkind = 'venv'\npath = '/no/such'\n",
        place,
    )
    return tmp_path / "data"


def listed(belljar: Belljar) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(belljar("env", "list", "--json").out)}


def test_the_list_has_every_environment_with_what_is_known_of_it(belljar: Belljar, town: Path, venv: Path) -> None:
    outcome = belljar("env", "list")

    rows = [line.split() for line in outcome.out.splitlines()]
    assert rows[0] == ["environment", "kind", "python", "packages", "size", "state", "interpreter"]
    assert [row[0] for row in rows[1:]] == ["default", "mine", "made", "gone"]
    assert rows[2][:3] == ["mine", "*", "venv"]
    assert rows[2][-1] == f"{venv}/bin/python"
    assert rows[3][-3:] == ["not", "made", "-"]
    assert "gone: no such environment: /no/such" in outcome.err
    assert not town.exists()


def test_json_has_the_packages_and_the_size(belljar: Belljar, town: Path) -> None:
    mine = listed(belljar)["mine"]

    assert mine["packages"] == {"cloudpickle": "3.0", "ipython": "9.0"}
    assert mine["version"] == ".".join(map(str, sys.version_info[:3]))
    assert mine["size_bytes"] > 0
    assert (mine["state"], mine["is_default"]) == ("ready", True)


def test_what_takes_long_says_what_it_does_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spinner = progress.Spinner("preparing made")
    spinner.update("fetching lamp")
    assert capsys.readouterr().err == "preparing made\n"
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    spinner.update("fetching house,\n 54 MB")
    spinner.close()
    assert capsys.readouterr().err == "preparing made: fetching house, 54 MB\n"


def test_a_managed_one_is_created_listed_and_removed(belljar: Belljar, town: Path) -> None:
    created = belljar("env", "create", "made")
    assert (created.code, created.out) == (0, "")
    # A busy machine has time for lines about the steps.
    assert re.match(r"preparing made\n(preparing made: .*\n)*made is ready: Python 3\.", created.err)
    made = listed(belljar)["made"]
    assert (made["state"], made["packages"]) == ("ready", {"house": "1.0"})

    removed = belljar("env", "remove", "made")

    assert removed.code == 0
    assert "removed " in removed.err
    assert listed(belljar)["made"]["state"] == "not made"


def test_none_is_removed_under_a_running_server(belljar: Belljar, town: Path, venv: Path) -> None:
    with live_server(town, venv, BELLJAR_CONFIG=os.devnull, BELLJAR_FORK_START="false", BELLJAR_POOL_SIZE=0):
        outcome = belljar("env", "remove", "made")

    assert outcome.code == 2
    assert outcome.err.startswith("error: a server that may use it is running: pid ")


def test_none_is_removed_while_sessions_are_kept_for_the_next_server(belljar: Belljar, town: Path) -> None:
    with open_supervisor(town, 60) as supervisor:
        assert supervisor is not None
        supervisor.store("session:one", Deposit({}, is_session=True))
        supervisor.close()
        outcome = belljar("env", "remove", "made")
        assert supervisor.connect_or_start()
        supervisor.drop("session:one")

    assert outcome.code == 2
    assert outcome.err.startswith("error: sessions that may use it are kept alive")


def test_those_that_no_setting_names_any_more_can_be_removed(belljar: Belljar, town: Path, place: Path) -> None:
    belljar("env", "create", "made")
    (folder,) = (town / "environments").glob("managed-*")
    assert belljar("env", "remove", "--unused").err == ""
    assert folder.is_dir()
    text = (place / "belljar.toml").read_text()
    write_trusted(text.replace("['house']", "['house<9']"), place)

    assert f"removed {folder}" in belljar("env", "remove", "--unused").err
    assert not folder.exists()


def test_one_that_cannot_be_made_says_why_and_the_others_are_made_all_the_same(belljar: Belljar, town: Path) -> None:
    share_support(town, "made-up-support")
    outcome = belljar("env", "create", "gone", "made")

    assert outcome.code == 1
    assert "error: gone: no such environment: /no/such" in outcome.err
    assert "made is ready" in outcome.err


def test_a_check_fails_when_one_is_broken_and_makes_nothing(belljar: Belljar, town: Path) -> None:
    outcome = belljar("env", "check")
    lines = outcome.out.splitlines()

    assert outcome.code == 1
    assert lines[1].startswith("ok    mine: venv, Python 3.")
    assert lines[2:] == ["ok    made: managed, not made yet", "fail  gone"]
    assert belljar("env", "check", "mine", "made").code == 0
    assert not town.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("check", "nowhere"), "unknown environment: nowhere"),
        (("create", "/etc"), "unknown environment: /etc"),
        (("remove", "mine"), "environment mine is of kind venv"),
        (("remove",), "no environment is named"),
        (("lock", "abc"), "there is no journal"),
    ],
)
def test_what_cannot_be_done_is_refused(belljar: Belljar, town: Path, arguments: tuple[str], complaint: str) -> None:
    outcome = belljar("env", *arguments)

    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {complaint}")
    assert "hint: " in outcome.err


def test_a_lock_has_the_sessions_own_packages_before_the_environments(
    belljar: Belljar, place: Path, tmp_path: Path, default_environment: Environment
) -> None:
    session = ran(tmp_path / "data", default_environment, "1")
    layer = tmp_path / "data" / "sessions" / session.session_id / "layer"
    for name in ("house-1.0", "numpy-0.1"):
        (layer / f"{name}.dist-info").mkdir(parents=True)
    (layer / "evil\nrm -rf-1.0.dist-info").mkdir()
    write_trusted(f"environment = '{default_environment.python}'\n", place)

    outcome = belljar("env", "lock", session.session_id[:8], "--data-directory", str(tmp_path / "data"))
    lines = outcome.out.splitlines()

    assert outcome.code == 0
    assert lines[0].startswith("# Python 3.")
    assert lines[1] == "# of this session alone: house, numpy"
    assert {"house==1.0", "numpy==0.1"} <= set(lines)
    assert sum(line.startswith("numpy==") for line in lines) == 1
    assert any(line.startswith("pandas==") for line in lines)
    assert "rm -rf" not in outcome.out
