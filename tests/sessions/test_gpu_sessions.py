"""Sessions with GPUs, in real sandboxes over a tree that is made up: device nodes with nothing behind them."""

from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from mcp import Client
from mcp.types import CallToolResult, TextContent

from belljar.environments import Environment
from belljar.errors import CopyRefused, GpuUnavailable, InvalidArgument
from belljar.executions.cell import make_cell
from belljar.files.fd_walk import remove_tree
from belljar.http.health import gpu_gauges
from belljar.journal.journal import new_id
from belljar.kernels.base import pid_of
from belljar.mcp.server import build_server
from belljar.models import ExecutionResult
from belljar.provisioning.gpu_monitor import GpuMonitor
from belljar.provisioning.program_process import run_program
from belljar.runtime import Runtime, open_runtime
from belljar.sandboxes.base import DeviceProvider
from belljar.sessions.fork import BY_STATE
from belljar.sessions.pool import new_folders
from belljar.sessions.session import Session
from belljar.settings import Settings
from made_up_gpus import MEBIBYTE, Library, make_host, stand_on, uuid_of

pytestmark = pytest.mark.anyio

OWNER = "somebody"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def host() -> Generator[Path]:
    """The made-up tree, where users of sessions can pass, as they can in /dev."""
    with TemporaryDirectory(prefix="belljar-gpus-") as folder, pytest.MonkeyPatch.context() as patch:
        root = Path(folder)
        root.chmod(0o755)
        stand_on(make_host(root), patch)
        yield root


@pytest.fixture(scope="module")
async def shared(default_environment: Environment, host: Path) -> AsyncGenerator[Runtime]:
    settings = Settings(
        environment=str(default_environment.python),
        data_directory=host / "data",
        pool_size=0,
        preload=[],
        gpus=["all"],
        max_gpus=2,
    )
    async with open_runtime(settings) as runtime:
        if gap := runtime.provider.no_nesting_reason():  # pyright: ignore[reportAttributeAccessIssue]
            pytest.skip(f"sessions cannot be forked here: {gap}")
        yield runtime


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
async def runtime(shared: Runtime, library: Library) -> AsyncGenerator[Runtime]:
    await shared.starter.wait_until_warm(shared.settings.environment)
    shared.starter.gpus.monitor = GpuMonitor(library)
    yield shared
    for session in shared.sessions.of(OWNER):
        await shared.sessions.clear(session.id, OWNER)


async def ran(session: Session, code: str) -> ExecutionResult:
    execution = session.submit(make_cell(session.settings, code))
    await execution.wait(60)
    return execution.result()


def index_of(session: Session) -> int:
    (gpu,) = session.gpus.of(session.id)
    return gpu.index


LIST = "import os; sorted(name for name in os.listdir('/dev') if name.startswith('nvidia'))"


async def test_a_session_sees_the_nodes_of_its_own_gpu_and_no_others(runtime: Runtime) -> None:
    session = runtime.sessions.create(OWNER)
    assert (await ran(session, LIST)).result == f"['nvidia-uvm', 'nvidia{index_of(session)}', 'nvidiactl']"
    both = runtime.sessions.create(OWNER, gpus=2)
    assert (await ran(both, LIST)).result == "['nvidia-uvm', 'nvidia0', 'nvidia1', 'nvidiactl']"
    none = runtime.sessions.create(OWNER, gpus=0)
    assert (await ran(none, LIST)).result == "[]"
    assert (session.info().gpus, none.info().gpus) == ([uuid_of(index_of(session))], [])


WRITE = """
import glob, os
open("/proc/self/comm", "w").write("written")
refused = []
paths = [path for path in glob.glob("/proc/*") if not path.split("/")[2].isdigit()]
for top in [os.path.join(folder, name) for path in paths if os.path.isdir(path) and not os.path.islink(path)
            for folder, _, names in os.walk(path) for name in names] + [p for p in paths if os.path.isfile(p)]:
    try:
        os.close(os.open(top, os.O_WRONLY | os.O_NONBLOCK))
        print("opens for writing:", top)
    except OSError:
        refused.append(top)
len(refused) > 100, any(path.startswith("/proc/sys/") for path in refused), open("/proc/self/comm").read()
"""


async def test_of_proc_only_the_files_of_its_own_processes_can_be_written(runtime: Runtime) -> None:
    result = await ran(runtime.sessions.create(OWNER), WRITE)
    assert (result.result, result.stdout) == ("(True, True, 'written\\n')", "")
    plain = await ran(runtime.sessions.create(OWNER, gpus=0), "open('/proc/self/comm', 'w').write('x')")
    assert "Read-only file system" in (plain.error or "")


async def test_a_fork_has_the_gpus_of_its_origin(runtime: Runtime) -> None:
    session = runtime.sessions.create(OWNER, gpus=2)
    await ran(session, "x = 1")
    fork, _ = await runtime.sessions.fork(session.id, OWNER)
    assert (await ran(fork, LIST)).result == "['nvidia-uvm', 'nvidia0', 'nvidia1', 'nvidiactl']"
    assert fork.info().gpus == [uuid_of(0), uuid_of(1)]


USE = "held = os.open('/dev/nvidia-uvm', os.O_RDWR); numbers = [1, 2]; lock = __import__('threading').Lock()"


async def test_a_session_with_a_gpu_is_forked_by_its_variables_and_says_what_is_lost(runtime: Runtime) -> None:
    session = runtime.sessions.create(OWNER)
    await ran(session, "import os")
    used = await ran(session, USE)
    fork, told = await runtime.sessions.fork(session.id, OWNER)
    assert (await ran(fork, "numbers, held > 2, len(os.sep)")).result == "([1, 2], True, 1)"
    assert told.lost[0] == BY_STATE
    assert any(line.startswith("lock (_thread.lock)") for line in told.lost)
    assert (await ran(session, "numbers")).result == "[1, 2]"
    with pytest.raises(CopyRefused, match="a session with a GPU is not forked from an earlier state"):
        await runtime.sessions.fork(session.id, OWNER, at=used.execution_id)


async def test_a_rewind_of_a_session_that_uses_its_gpu_says_why_it_cannot(runtime: Runtime) -> None:
    session = runtime.sessions.create(OWNER)
    await ran(session, "import os")
    used = await ran(session, USE)
    last = await ran(session, "numbers.append(3)")
    with pytest.raises(Exception, match=r"no state was kept .* it uses a GPU"):
        await session.rewind(last.execution_id)
    # The state from before it used the GPU can be had.
    await session.rewind(used.execution_id)
    assert (await ran(session, "'numbers' in globals()")).result == "False"


async def test_a_session_that_sleeps_wakes_with_as_many_gpus(runtime: Runtime) -> None:
    session = runtime.sessions.create(OWNER, gpus=2)
    await ran(session, "x = 41")
    await runtime.sessions.endings.hibernate(session, "slept")
    woken = await runtime.sessions.reach(session.id, OWNER)
    assert (await ran(woken, "x + 1")).result == "42"
    assert (await ran(woken, LIST)).result == "['nvidia-uvm', 'nvidia0', 'nvidia1', 'nvidiactl']"


async def test_a_session_wakes_with_its_variables_where_its_gpus_are_gone(runtime: Runtime, host: Path) -> None:
    session = runtime.sessions.create(OWNER)
    await ran(session, "x = 41")
    await runtime.sessions.endings.hibernate(session, "slept")
    control = host / "dev/nvidiactl"
    control.rename(host / "taken")
    try:
        woken = await runtime.sessions.reach(session.id, OWNER)
        assert (await ran(woken, "x + 1")).result == "42"
        assert (await ran(woken, LIST)).result == "[]"
    finally:
        (host / "taken").rename(control)


async def test_gpu_memory_is_in_the_usage_and_a_shortage_has_a_name_of_its_own(
    runtime: Runtime, library: Library
) -> None:
    session = runtime.sessions.create(OWNER)
    await ran(session, "class OutOfMemoryError(RuntimeError): pass")
    library.held_mb = {pid_of(session.session_kernel.kernel): 1_500, 1: 700}
    library.free_mb = [200, 200]
    result = await ran(session, "raise OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')")
    assert (result.status, result.usage.gpu_memory_mb) == ("error", 1_500)
    assert result.cause == (
        "gpu_out_of_memory: the session asked for more GPU memory than is free, it holds 1,500 MB now, "
        f"GPU {index_of(session)} has 200 of 100,000 MB free; the kernel lives, variables are kept: delete tensors "
        "(and torch.cuda.empty_cache()) or use smaller ones"
    )
    assert (session.info().gpu_memory_mb, (await ran(session, "1 + 1")).cause) == (1_500, None)


async def test_a_death_says_how_much_gpu_memory_went_with_it(runtime: Runtime, library: Library) -> None:
    session = runtime.sessions.create(OWNER)
    await ran(session, "import os")
    library.held_mb = {pid_of(session.session_kernel.kernel): 1_500}
    result = await ran(session, "import time; time.sleep(1.2); os._exit(3)")
    assert result.status == "died"
    assert (result.cause or "").endswith("exit status 3; the 1,500 MB that it held on its GPU are free again")


async def test_more_gpus_than_there_are_or_than_the_policy_allows_are_refused(runtime: Runtime) -> None:
    with pytest.raises(InvalidArgument, match="gpus is 3, and a session may have 2"):
        runtime.sessions.create(OWNER, gpus=3)
    with pytest.raises(InvalidArgument, match="gpus is -1"):
        runtime.sessions.create(OWNER, gpus=-1)


async def test_a_sandbox_that_gives_no_gpus_says_so(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(runtime.provider), "shows_devices")
    DeviceProvider._abc_caches_clear()  # type: ignore[attr-defined]  # since 3.12 what a class has is remembered
    with pytest.raises(GpuUnavailable, match="the sandbox namespace gives no GPU"):
        runtime.sessions.create(OWNER, gpus=1)
    DeviceProvider._abc_caches_clear()  # type: ignore[attr-defined]


async def test_a_model_is_offered_gpus_where_there_are_some_and_told_what_it_has(runtime: Runtime) -> None:
    async with Client(build_server(runtime, ["interpreter"])) as client:
        (tool,) = [tool for tool in (await client.list_tools()).tools if tool.name == "new_session"]
        assert "How many GPUs" in tool.input_schema["properties"]["gpus"]["description"]
        made = await client.call_tool("new_session", {"gpus": 2})
        assert " It has GPU 0 (NVIDIA H200), GPU 1 (NVIDIA H200)." in texts(made)
        asked = await client.call_tool("new_session", {"gpus": 3})
        assert (asked.is_error, "gpus is 3, and a session may have 2" in texts(asked)) == (True, True)
        ran_at_once = await client.call_tool("execute_code", {"code": "1"})
        assert " It has GPU " in texts(ran_at_once)
        assert "2 GPUs with 0 MB of it" in texts(await client.call_tool("list_sessions", {}))
        for info in ((await client.call_tool("list_sessions", {})).structured_content or {})["sessions"]:
            await client.call_tool("clear_session", {"session_id": info["session_id"]})


def texts(answer: CallToolResult) -> str:
    return "".join(block.text for block in answer.content if isinstance(block, TextContent))


async def test_metrics_tell_the_memory_and_the_sessions_of_each_gpu(runtime: Runtime, library: Library) -> None:
    session = runtime.sessions.create(OWNER, gpus=2)
    await ran(session, "1")
    pid = pid_of(session.session_kernel.kernel)
    library.held_mb, library.free_mb = {pid: 1_000}, [90_000, 40_000]
    found = {gauge.name: gauge.values for gauge in gpu_gauges(runtime, {session.id: pid})}
    assert found == {
        "belljar_gpu_memory_used_bytes": {"0": 10_000 * MEBIBYTE, "1": 60_000 * MEBIBYTE},
        "belljar_gpu_memory_bytes": {"0": 100_000 * MEBIBYTE, "1": 100_000 * MEBIBYTE},
        "belljar_gpu_sessions": {"0": 1, "1": 1},
        "belljar_sessions_gpu_memory_bytes": {"": 1_000 * MEBIBYTE},
    }


async def test_a_program_without_a_session_has_a_gpu_and_gives_its_place_up(runtime: Runtime) -> None:
    starter = runtime.starter
    environment = await starter.environments.get(runtime.settings.environment)
    folders = new_folders(runtime.settings.data_directory / "runs", starter, new_id())
    end = await run_program(starter, environment, folders, ["-c", LIST.replace("; ", "; print(") + ")"], timeout_s=60)
    assert "'nvidia-uvm', 'nvidia" in end.stdout
    assert starter.gpus.of(folders.session_id) == ()
    remove_tree(folders.root)


async def test_a_gpu_that_is_taken_away_is_told_and_variables_are_kept(runtime: Runtime, host: Path) -> None:
    session = runtime.sessions.create(OWNER)
    await ran(session, "x = 1")
    node = f"/dev/nvidia{index_of(session)}"
    (host / node[1:]).unlink()
    result = await ran(session, "raise RuntimeError('CUDA error: unknown error')")
    assert (result.cause or "").startswith(f"gpu_lost: the session cannot use its GPU any more: device {node}")
    assert (await ran(session, "x")).result == "1"
    refused = await ran(runtime.sessions.create(OWNER, gpus=2), "1")
    assert (refused.status, f"device {node} is not there" in (refused.error or "")) == ("rejected", True)
    assert (await ran(runtime.sessions.create(OWNER, gpus=0), "1")).result == "1"
    (host / node[1:]).touch(0o666)
    (host / node[1:]).chmod(0o666)
