"""A full disk costs what cannot be kept, never the result."""

from pathlib import Path

import anyio
import pytest
from calls import opened_runtime

from belljar.environments import Environment
from belljar.sessions.execution import Cell

pytestmark = pytest.mark.anyio


async def test_results_are_told_while_the_journal_cannot_be_written(default_environment: Environment, tmp_path: Path):
    async with opened_runtime(default_environment, tmp_path) as runtime:
        session = runtime.sessions.create("local")
        # What SQLite says when its file may not grow is what it says on a full disk.
        runtime.sessions.journal._connection.execute("PRAGMA max_page_count = 1")
        for code, expected in (("x = 1\nprint('y' * 3_000_000)\n'end'", "'end'"), ("x", "1")):
            execution = session.submit(Cell(code, timeout_s=60))
            with anyio.fail_after(60):
                await execution.wait(60)
            result = runtime.sessions.result(execution.id, "local")
            assert (result.status, result.result, result.state) == ("ok", expected, "kept")


async def test_a_display_that_cannot_be_kept_says_so(default_environment: Environment, tmp_path: Path):
    async with opened_runtime(default_environment, tmp_path) as runtime:
        session = runtime.sessions.create("local")
        session.folders.displays.write_text("no folder can be made here")
        execution = session.submit(Cell("display({'image/png': 'aGVsbG8='}, raw=True)\n'shown'", timeout_s=60))
        with anyio.fail_after(60):
            await execution.wait(60)
        result = execution.result()
        assert (result.status, result.result) == ("ok", "'shown'")
        assert str(result.displays[0].text).startswith("<not kept: ")


async def test_a_flood_of_tiny_displays_is_capped_like_any_output(default_environment: Environment, tmp_path: Path):
    code = (
        "from IPython.display import clear_output\nfor n in range(2_000):\n  display({'text/html': str(n)}, raw=True)"
    )
    code += "\n  display({'image/png': 'aGVsbG8%05d' % n}, raw=True); clear_output(wait=True)\n'end'"
    async with opened_runtime(default_environment, tmp_path, output_cap_bytes=200_000) as runtime:
        session = runtime.sessions.create("local")
        execution = session.submit(Cell(code, timeout_s=60))
        with anyio.fail_after(60):
            await execution.wait(60)
        assert execution.result().result == "'end'"
        assert execution.sequence < 200
        assert len(list((session.folders.displays / execution.id).iterdir())) < 60
