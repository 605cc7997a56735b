"""Cells that use too much: what the caller is told, what survives, and that nobody else notices."""

import re
from collections.abc import AsyncGenerator

import pytest
from calls import Caller, opened_runtime, text_of, until_said

from belljar.environments import Environment
from belljar.files import disk_usage
from belljar.models import ExecutionResult
from belljar.runtime import Runtime
from belljar.sandboxes.limits.server_groups import PREFIX
from belljar.sandboxes.limits.systemd_scope import find_control_groups
from waiting import until

pytestmark = pytest.mark.anyio

MEMORY_MB = 256
EAT = "held = []\nwhile len(held) < 200: held.append(bytearray(b'x' * (10 << 20)))\nprint('ate all')"
FORK = (
    "import os, signal\nchildren = []\ntry:\n  while len(children) < 500:\n"
    "    if (child := os.fork()) == 0: signal.pause()\n    children.append(child)\n"
    "finally:\n  for child in children: os.kill(child, signal.SIGKILL); os.waitpid(child, 0)\n"
)
# Writes files of 1 MB until it is stopped, and no more than 400 of them; so slowly that a busy server looks at the
# folder long before it holds so much that the session is killed.
FILL = (
    "import time\nfor number in range({count}):\n  open(f'{folder}{{number}}', 'wb').write(bytes(1 << 20))\n"
    "  time.sleep(0.05)\nprint('filled')"
)

MANY = "import os, time\nfor number in range(4_000):\n  open(str(number), 'w').close()\n  time.sleep(0.005)"


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    """An engine whose sessions have little."""
    if {*find_control_groups().usable()} != {"memory", "cpu", "pids"}:
        pytest.skip("control groups cannot be written here")
    limits = {"memory_mb": MEMORY_MB, "max_processes": 40, "disk_mb": 20, "temporary_mb": 16, "cpus": 0.5}
    limits["interrupt_grace_s"] = 30  # half a processor of a busy machine is little
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("belljar"), **limits) as runtime:
        yield runtime


async def test_a_memory_bomb_in_the_kernel_is_out_of_memory_and_harms_nobody_else(caller: Caller) -> None:
    other = await caller.execute("kept = 1")
    first = await caller.execute("precious = 1\nopen('file', 'w').write('stays')")
    answer = await caller.whole("execute_code", code=EAT, session_id=first.session_id)
    assert answer.is_error
    result = ExecutionResult.model_validate(answer.structured_content)
    assert (result.status, result.success, result.state) == ("out_of_memory", False, "lost")
    assert result.cause == (
        f"out_of_memory: the session used {MEMORY_MB} MB, the limit is {MEMORY_MB} MB; "
        "the kernel was killed, variables are lost, files are kept"
    )
    assert result.error == result.cause
    assert "precious" in result.lost
    assert result.cause in text_of(answer)
    assert (await caller.get(result.execution_id)).cause == result.cause, "the journal has it too"
    after = await caller.execute("'precious' in globals(), open('file').read()", first.session_id)
    assert (after.result, after.state) == ("(False, 'stays')", "lost")
    assert "out_of_memory" in "".join(after.output)
    assert (await caller.execute("kept", other.session_id)).result == "1"
    assert await last_cause(caller, first.session_id) == result.cause
    assert await last_cause(caller, other.session_id) is None


async def last_cause(caller: Caller, session_id: str) -> str | None:
    sessions = (await caller.fields("list_sessions"))["sessions"]
    return next(session["last_cause"] for session in sessions if session["session_id"] == session_id)


async def test_a_memory_bomb_in_a_child_leaves_the_kernel_and_a_word(caller: Caller) -> None:
    code = f"import subprocess, sys\nkept = 1\nsubprocess.run([sys.executable, '-c', {EAT!r}]).returncode"
    result = await caller.execute(code)
    assert (result.status, result.result, result.state, result.error) == ("ok", "-9", "kept", None)
    assert f"[belljar: out_of_memory: the session used {MEMORY_MB} MB" in "".join(result.output)
    assert "the kernel lives, variables are kept" in (result.cause or "")
    assert result.usage.peak_memory_mb > 200, "the children's memory counts"
    after = await caller.execute("kept", result.session_id)
    assert (after.result, after.cause) == ("1", None)
    assert after.usage.peak_memory_mb < 200


async def test_a_kernel_that_eats_memory_between_cells_is_told_to_the_next(runtime: Runtime, caller: Caller) -> None:
    wait = "while not os.path.exists('go'): time.sleep(0.005)"
    code = f"import os, threading, time\ndef eat():\n  {wait}\n  exec({EAT!r})\n"
    first = await caller.execute(code + "threading.Thread(target=eat).start()")
    await caller.release(first.session_id)
    await kernel_is_gone(runtime, first.session_id)
    after = await caller.execute("'ran'", first.session_id)
    assert (after.status, after.state, after.result) == ("ok", "lost", "'ran'")
    assert "out_of_memory" in "".join(after.output)


async def kernel_is_gone(runtime: Runtime, session_id: str) -> None:
    kernel = runtime.sessions.get(session_id, "local").session_kernel.kernel
    assert kernel is not None
    await until(lambda: not kernel.is_alive())


async def test_a_fork_bomb_is_refused_and_the_session_goes_on(caller: Caller) -> None:
    first = await caller.execute("kept = 1")
    result = await caller.execute(FORK, first.session_id)
    assert (result.status, result.state) == ("error", "kept")
    assert (result.error or "").startswith("BlockingIOError")
    assert (result.cause or "").startswith("too_many_processes: the session wanted more than 40 processes and threads")
    assert "[belljar: too_many_processes: " in "".join(result.output)
    assert (await caller.execute("kept", first.session_id)).result == "1"


async def test_a_cell_that_fills_the_disk_is_interrupted_and_deleting_makes_room(caller: Caller) -> None:
    first = await caller.execute("kept = 1")
    result = await caller.execute(FILL.format(folder="", count=400), first.session_id)
    assert (result.status, result.state) == ("interrupted", "kept")
    assert (result.error or "").startswith("disk_full: the session folder holds ")
    assert "the limit is 20 MB" in (result.cause or "")
    refused = await caller.refusal("upload_file", session_id=first.session_id, name="more", text="x")
    assert refused.startswith("too-large: disk_full: ")
    still = await caller.execute("kept", first.session_id)
    assert (still.status, still.result) == ("ok", "1")
    assert "delete files" in "".join(still.output)
    emptied = await caller.execute(
        "import os\nfor name in os.listdir(): os.remove(name)\nos.listdir()", first.session_id
    )
    assert (emptied.status, emptied.result, emptied.cause) == ("ok", "[]", None)
    await caller.fields("upload_file", session_id=first.session_id, name="more", text="x")


async def test_a_cell_that_makes_very_many_files_is_interrupted_too(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_usage, "_FEWEST_FILES", 500)
    monkeypatch.setattr(disk_usage, "_FILES_PER_MB", 1)
    first = await caller.execute("kept = 1")
    result = await caller.execute(MANY, first.session_id)
    assert (result.status, result.state) == ("interrupted", "kept")
    assert re.match(
        r"disk_full: the session folder holds [\d,]+ files and folders, the limit is 500, so", result.error or ""
    )
    refused = await caller.refusal("upload_file", session_id=first.session_id, name="more", text="x")
    assert refused.startswith("too-large: disk_full: ")
    emptied = await caller.execute("for name in os.listdir(): os.remove(name)\nkept", first.session_id)
    assert (emptied.status, emptied.result, emptied.cause) == ("ok", "1", None), emptied


async def test_what_a_cell_left_writing_is_stopped_too(runtime: Runtime, caller: Caller) -> None:
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {FILL.format(folder='', count=400)!r}])"
    )
    first = await caller.execute(code)
    await kernel_is_gone(runtime, first.session_id)
    after = await caller.execute("'ran'", first.session_id)
    assert (after.status, after.state, after.result) == ("ok", "lost", "'ran'")
    assert "disk_full" in "".join(after.output)


async def test_one_file_has_a_size_limit_and_temporary_folders_have_too(caller: Caller) -> None:
    # The first takes no room on the disk: a cell that fills its folder may be stopped before it reads the error.
    code = (
        "told = []\nfor name in ('big', '/tmp/big'):\n  try:\n    with open(name, 'wb') as file:\n"
        "      if name == 'big': file.truncate(21 << 20)\n"
        "      for _ in range(50): file.write(bytes(1 << 20)); file.flush()\n"
        "  except OSError as error: told.append(error.errno)\n  os.remove(name)\ntold"
    )
    assert (await caller.execute("import os\n" + code)).result == "[27, 28]"


async def test_a_cell_that_uses_all_its_processor_time_is_interrupted_in_time(runtime: Runtime, caller: Caller) -> None:
    code = "import threading\nkept = 1\ndef spin():\n  while True: pass\n"
    code += "for _ in range(8): threading.Thread(target=spin, daemon=True).start()\nprint('held', flush=True)\nspin()"
    cell = await caller.execute(code, wait_s=0)
    await until_said(runtime, cell.execution_id, "held")
    await caller.fields("interrupt_execution", execution_id=cell.execution_id)
    result = await caller.get(cell.execution_id, wait_s=10)
    assert (result.status, result.state) == ("interrupted", "kept")
    assert result.usage.cpu_s <= 0.6 * result.usage.wall_s + 0.5
    await caller.fields("clear_session", session_id=cell.session_id)


async def test_a_cell_sees_the_machine_that_it_may_use(caller: Caller) -> None:
    code = "import os, psutil\n(os.cpu_count(), len(os.sched_getaffinity(0)), psutil.virtual_memory().total >> 20)"
    assert (await caller.execute(code)).result == f"(1, 1, {MEMORY_MB})"


async def test_groups_are_gone_after_their_sessions(runtime: Runtime, caller: Caller) -> None:
    result = await caller.execute("1")
    folders = find_control_groups().usable().values()
    mine = [path for folder in folders for path in folder.glob(f"{PREFIX}*/{result.session_id}-*")]
    assert len(mine) == 3
    await caller.fields("clear_session", session_id=result.session_id)
    assert not any(path.exists() for path in mine)
