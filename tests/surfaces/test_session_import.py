"""`belljar sessions import`, and the check of a store: what one data directory left is in another one's lists."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from calls import opened_runtime, settings_for
from test_stored_sessions import KEY, LOOK, MAKE, SEEN, put, server

from belljar.cli.doctor import check_store
from belljar.environments import Environment
from belljar.errors import BelljarError
from belljar.sessions.store import FolderStore
from ran_commands import belljar, place

__all__ = ["belljar", "place"]
pytestmark = pytest.mark.anyio
Run = Callable[..., Any]


@pytest.fixture
def run(belljar: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command of the new machine."""
    monkeypatch.setenv("BELLJAR_STORE", f"file://{tmp_path / 'store'}")
    monkeypatch.setenv("BELLJAR_STORE_KEY", KEY)
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(tmp_path / "new"))
    return belljar


async def ran(run: Run, *words: str) -> Any:
    """In a thread, because the command has an event loop of its own."""
    return await anyio.to_thread.run_sync(lambda: run(*words))


async def test_what_sleeps_in_the_store_is_listed_on_a_new_machine_and_wakes_there(
    default_environment: Environment, tmp_path: Path, run: Run
) -> None:
    async with server(default_environment, tmp_path / "old", tmp_path / "store") as (one, caller):
        made, awake = await caller.execute(MAKE), await caller.execute("never = 'slept'")
        await put(one)
        await caller.execute("1", awake.session_id)
        outcome = await ran(run, "sessions", "import")
        assert (outcome.code, outcome.out) == (0, "1 sessions were brought; `belljar sessions --all` lists them\n")
        assert re.search(f"session {awake.session_id} is open at .* since", outcome.err)
        assert made.session_id in (await ran(run, "sessions", "--all", "--json")).out
        assert "0 sessions were brought" in (await ran(run, "sessions", "import")).out
        for bundle in (tmp_path / "store").glob(f"sessions/{made.session_id}/*.bundle"):
            bundle.unlink()
        async with server(default_environment, tmp_path / "new", tmp_path / "store") as (_, elsewhere):
            assert (await elsewhere.execute(LOOK, made.session_id)).result == SEEN


async def test_what_a_data_directory_without_a_store_left_comes_through_one(
    default_environment: Environment, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "store").mkdir()
    async with opened_runtime(default_environment, tmp_path / "old", hibernate=True) as runtime:
        session = runtime.sessions.create("local")
        await session.start()
        (tmp_path / "old" / "sessions" / session.id / "workspace" / "file").write_text("kept")
        assert (await ran(run, "sessions", "import", str(tmp_path / "old"))).err.startswith(
            "error: a server still runs"
        )
    assert "1 sessions were brought" in (await ran(run, "sessions", "import", str(tmp_path / "old"))).out
    assert (tmp_path / "new" / "sessions" / session.id / "workspace" / "file").read_text() == "kept"


def test_import_without_a_store_or_from_no_data_directory_says_what_to_do(
    belljar: Run, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    assert "is no data directory of belljar" in run("sessions", "import", str(tmp_path)).err
    monkeypatch.delenv("BELLJAR_STORE")
    outcome = belljar("sessions", "import")
    assert (outcome.code, "no store through which sessions could come" in outcome.err) == (2, True)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"store_key": ""}, "there is no store_key"),
        ({"store": "file:///no/such/folder"}, "does not exist"),
        ({"store_key": "x" * 40}, "has another key"),
    ],
)
def test_doctor_says_why_a_store_cannot_be_used(
    default_environment: Environment, tmp_path: Path, chosen: dict[str, str], said: str
) -> None:
    (tmp_path / "store").mkdir()
    usual = {"store": f"file://{tmp_path / 'store'}", "store_key": KEY}
    (found,) = check_store(settings_for(default_environment, tmp_path, **usual))
    assert (found.status, "claimed once of two" in found.detail) == ("ok", True)
    with pytest.raises(BelljarError, match=said):
        [*check_store(settings_for(default_environment, tmp_path, **usual | chosen))]
    left = {path.name for path in (tmp_path / "store").iterdir()} - {".unfinished"}
    assert left == {"belljar.json"}, "nothing is left of the trial"


def test_of_fifty_that_make_one_object_of_a_folder_one_does(tmp_path: Path) -> None:
    store, made = FolderStore("file:///", tmp_path), list[bool]()
    ready = threading.Barrier(50)

    def claim() -> None:
        ready.wait()
        made.append(store.put_new("sessions/a/1.owner", b"content"))

    threads = [threading.Thread(target=claim) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 49 + [True]


@pytest.mark.parametrize(
    "url",
    ["/srv/store", "ftp://host/x", "s3://", "file://host/x", "file:///", "s3://key:secret@bucket/x", "file:///a/../b"],
)
def test_a_url_that_is_no_store_is_refused_with_the_forms_there_are(
    default_environment: Environment, tmp_path: Path, url: str
) -> None:
    with pytest.raises(ValueError, match=r"begins with none|by its absolute path|no bucket|credentials and|contains"):
        settings_for(default_environment, tmp_path, store=url)
