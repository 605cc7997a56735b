"""A full disk costs what cannot be kept, never the result. What no server can start with is said in a line."""

import subprocess
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from calls import connected, opened_runtime, text_of, until_said
from mcp import MCPError

from belljar.environments import Environment
from belljar.errors import SettingsError
from belljar.executions.cell import Cell
from belljar.servers import run_folder
from waiting import until

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
            result = runtime.sessions.executions.result(execution.id, "local")
            assert (result.status, result.result, result.state) == ("ok", expected, "kept")


async def test_what_was_told_while_it_could_not_be_written_is_kept_once_it_can_be(
    default_environment: Environment, tmp_path: Path
):
    code = "for i in range(1_000): print(i)\nx"
    everything = "".join(f"{i}\n" for i in range(1_000))
    async with (
        opened_runtime(default_environment, tmp_path, hibernate=True) as runtime,
        connected(runtime) as caller,
    ):
        first = await caller.execute("x = 1")
        journal = runtime.sessions.journal
        journal._connection.execute("PRAGMA max_page_count = 1")
        told = await caller.execute(code, first.session_id, idempotency_key="once")
        assert (told.status, told.result) == ("ok", "1")
        again = await caller.execute(code, first.session_id, idempotency_key="once")
        assert again.execution_id == told.execution_id
        assert journal.is_failing
        assert await caller.read_text(f"execution://{told.execution_id}/output") == everything
        assert await caller.read_text(f"execution://{told.execution_id}/output?offset=2&limit=5") == "1\n2\n3"
        with pytest.raises(MCPError, match="busy: the journal cannot be written now, and the notebook would lack"):
            await caller.read_text(f"session://{first.session_id}/notebook")
        journal._connection.execute("PRAGMA max_page_count = 1000000")
        await until(lambda: not journal.is_failing)
    async with (
        opened_runtime(default_environment, tmp_path, hibernate=True) as runtime,
        connected(runtime) as caller,
    ):
        assert (await caller.get(told.execution_id)).stdout == told.stdout
        whole = await caller.read_text(f"execution://{told.execution_id}/output")
        assert whole == everything
        assert (await caller.execute("x", first.session_id)).result == "1"


async def test_output_that_was_dropped_says_so_to_whoever_asks(default_environment: Environment, tmp_path: Path):
    async with opened_runtime(default_environment, tmp_path, journal_mb=16) as runtime, connected(runtime) as caller:
        old = await caller.execute("for i in range(100_000): print('x' * 100)\n'the end'")
        new = await caller.execute("for i in range(100_000): print('y' * 100)", old.session_id)
        runtime.sessions.journal.has_grown.set()

        async def is_told() -> bool:
            return "was dropped at" in (await caller.get(old.execution_id, since=1)).output[-1]

        async def is_dropped() -> bool:
            return "was dropped at" in await caller.read_text(f"execution://{old.execution_id}/output")

        await until(is_told)
        assert "within 16 MB" in (await caller.get(old.execution_id, since=1)).output[-1]
        await until(is_dropped)  # the line comes first, then what it stands for goes
        assert "was dropped at" in await caller.read_text(f"session://{old.session_id}/notebook")
        pages = [
            await caller.read_text(f"execution://{new.execution_id}/output?offset={start}&limit=8000000")
            for start in (0, 8_000_000)
        ]
        assert "".join(pages) == ("y" * 100 + "\n") * 100_000
        first = await caller.read_text(f"execution://{new.execution_id}/output")
        rest = f"execution://{new.execution_id}/output?offset=8000000"
        assert first == f"{pages[0]}\n[belljar: this is not the end: {rest} goes on]\n"
        assert await caller.read_text(rest) == pages[1]
        # Long ago, and from the journal alone.
        runtime.sessions.get(old.session_id, "local").queue._executions.clear()
        told = await caller.get(old.execution_id)
        assert (told.status, told.result, told.truncated) == ("ok", "'the end'", None)
        assert "was dropped at" in told.output[0]


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A disk of its own, which a test can fill."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=40m,mode=755", "none", str(place)]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    for size_bytes in (65_536, 4_096, 1):
        with suppress(OSError), (place / "filler").open("ab", buffering=0) as filler:
            while True:
                filler.write(b"z" * size_bytes)


async def test_a_rewind_on_a_full_disk_says_once_what_came_back(default_environment: Environment, small_disk: Path):
    chosen = {"checkpoint_disk_mb": 30, "on_death": "rewind"}
    write = "x = {}\nimport os\nfor name in 'ab': open(name, 'w').write('y' * 3_000_000)"
    delete = "x = 0\nfor name in 'ab': os.unlink(name)\nprint('deleted', flush=True)\n"
    async with opened_runtime(default_environment, small_disk, **chosen) as runtime, connected(runtime) as caller:
        first = await caller.execute(write.format(1))
        second = await caller.execute(delete, first.session_id)
        fill(small_disk)
        rewound = text_of(await caller.call("rewind_session", session_id=first.session_id, to=second.execution_id))
        assert f"before execution {second.execution_id}: variables, and files but for those that did not" in rewound
        (line,) = [line for line in rewound.splitlines() if "No space left" in line]
        assert line.startswith("Did not come back: files ")
        assert line.count("No space left on device") == 1
        assert (await caller.execute("x", first.session_id)).result == "1"
        (small_disk / "filler").unlink()
        await caller.execute(write.format(2), first.session_id)
        dying = await caller.execute(f"{delete}import time\nwhile True: time.sleep(0.01)", first.session_id, wait_s=0)
        await until_said(runtime, dying.execution_id, "deleted")
        fill(small_disk)
        kernel = runtime.sessions.get(first.session_id, "local").session_kernel.kernel
        assert kernel is not None
        await kernel.kill()
        died = await caller.ended(dying.execution_id)
        assert (died.status, died.state) == ("died", "rewound")
        (notice,) = [line for line in died.output if "rewound" in line]
        assert "variables, and files but for those that did not come back, are as they were before this cell" in notice
        (lost,) = died.lost
        assert lost.startswith("files ")
        assert lost.endswith("cannot be restored: No space left on device")


async def test_a_journal_that_is_found_damaged_is_told_at_the_start(default_environment: Environment, tmp_path: Path):
    async with opened_runtime(default_environment, tmp_path) as runtime:
        runtime.sessions.create("local")
    damaged = bytearray((tmp_path / "journal.sqlite").read_bytes())
    damaged[4096:] = b"A" * (len(damaged) - 4096)
    (tmp_path / "journal.sqlite").write_bytes(damaged)
    with pytest.raises(SettingsError, match="cannot be used: database disk image is malformed"):
        async with opened_runtime(default_environment, tmp_path):
            pass


def test_a_data_directory_that_cannot_be_made_is_told_at_the_start(tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(SettingsError, match=r"data_directory .*/file cannot be used: Not a directory"),
        run_folder(tmp_path / "file"),
    ):
        pass
