"""A journal that is damaged or removed while its server runs: operators are told, and callers in each result."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from calls import connected, opened_runtime

from belljar.environments import Environment
from belljar.http.health import Operations
from belljar.journal import damage
from waiting import until

pytestmark = pytest.mark.anyio
PAGE = 4096


def overwrite_tables(path: Path, *tables: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        marks = ", ".join("?" * len(tables))
        query = f"SELECT rootpage FROM sqlite_master WHERE name IN ({marks})"
        roots = [root for (root,) in connection.execute(query, tables)]
    with path.open("r+b") as file:
        for root in roots:
            file.seek((root - 1) * PAGE)
            file.write(b"\xa5" * PAGE)


async def test_a_journal_that_is_damaged_while_its_server_runs_is_found_and_told(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage, "INTERVAL_S", 0.01)
    path = tmp_path / "journal.sqlite"
    async with (
        opened_runtime(default_environment, tmp_path, hibernate=True) as runtime,
        connected(runtime) as caller,
    ):
        sleeping = await caller.execute("x = 1")
        await runtime.sessions.endings.hibernate(runtime.sessions.get(sleeping.session_id, "local"), "slept")
        awake = await caller.execute("y = 2")
        journal = runtime.sessions.journal
        journal.commit()
        assert awake.notices == []
        overwrite_tables(path, "executions")
        await until(lambda: journal.damage)
        assert (await Operations(runtime).checks())["journal"].startswith("is damaged: ")
        # What the server has read before is in its memory, and would hide the damage for a while.
        journal._connection.execute("PRAGMA shrink_memory")
        result = await caller.execute("y + 1", awake.session_id)
        assert (result.status, result.result) == ("ok", "3")
        assert any("this execution is not kept: the server's journal is damaged" in line for line in result.output)
        assert (await caller.get(result.execution_id)).output == result.output
        refused = await caller.execute("x", sleeping.session_id)
        assert (refused.status, str(refused.error).partition(":")[0]) == ("rejected", "journal-damaged")


async def test_a_journal_that_is_removed_while_its_server_runs_is_told_at_once(
    default_environment: Environment, tmp_path: Path
) -> None:
    async with opened_runtime(default_environment, tmp_path) as runtime, connected(runtime) as caller:
        first = await caller.execute("x = 1")
        (tmp_path / "journal.sqlite").unlink()
        assert "was removed or replaced" in (await Operations(runtime).checks())["journal"]
        result = await caller.execute("x", first.session_id)
        assert (result.status, result.result) == ("ok", "1")
        assert any(
            "this execution is not kept: the server's journal was removed or replaced" in line for line in result.output
        )
