"""Real kernels that are not Python's own, behind the same path as every session: found by name, sealed, told alike."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from foreign_kernels import foreign_kernels

import belljar
from belljar.environments import Environment
from belljar.errors import EnvironmentBroken
from belljar.models import ExecutionResult

pytestmark = pytest.mark.anyio

# On a busy machine a kernel takes its time to hear an interrupt.
SPARED: dict[str, object] = {"fork_start": False, "pool_size": 0, "checkpoints": 0, "interrupt_grace_s": 30}


@pytest.fixture(scope="module")
async def engine(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[belljar.Engine]:
    """One that finds the kernels of bash, xeus-python and Deno where Jupyter does."""
    environment = foreign_kernels()
    deno = tmp_path_factory.mktemp("jupyter")
    (deno / "kernels/deno").mkdir(parents=True)
    command = [str(environment / "bin/deno"), "jupyter", "--kernel", "--conn", "{connection_file}"]
    told = {"argv": command, "display_name": "Deno", "language": "typescript"}
    (deno / "kernels/deno/kernel.json").write_text(json.dumps(told))
    folder = tmp_path_factory.mktemp("data")
    folder.chmod(0o711)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", f"{environment / 'share/jupyter'}:{deno}")
        flags: dict[str, object] = {"data_directory": folder, "environment": str(default_environment.python), **SPARED}
        async with belljar.open_engine(**flags) as engine:
            yield engine


@asynccontextmanager
async def interrupted(session: belljar.SessionHandle, code: str) -> AsyncIterator[ExecutionResult]:
    """A cell that is interrupted when it says something; once, because a second time may hit what comes after it."""
    stream = session.stream(code)
    is_told = False
    async for event in stream:
        if event.kind == "stdout" and not is_told:
            is_told = True
            await session.interrupt()
    yield stream.result


async def test_bash(engine: belljar.Engine, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    async with engine.open_session("kernel:bash") as session:
        first = await session.execute("count=41; echo $((count + 1)); echo spoken >&2")
        assert (first.status, first.stdout.split()) == ("ok", ["42", "spoken"])
        assert (await session.execute("echo $count > kept.txt")).files[0].name == "kept.txt"
        assert await session.download("kept.txt") == b"41\n"
        failed = await session.execute("false")
        assert (failed.status, failed.error) == ("error", "Error: 1")
        assert "No such file" in (await session.execute(f"cat {secret}")).stdout
        async with interrupted(session, "echo on; sleep 600") as stopped:
            assert stopped.status == "interrupted"
        assert (await session.execute("echo $count")).stdout == "41\n"


async def test_a_kernel_in_c_plus_plus(engine: belljar.Engine) -> None:
    async with engine.open_session("kernel:xpython") as session:
        assert (await session.execute("kept = 41\nprint('said')\nkept + 1")).result == "42"
        raised = await session.execute("1 / 0")
        assert (raised.status, "ZeroDivisionError" in (raised.error or "")) == ("error", True)

        async def on_input(prompt: str) -> str:
            return f"answer to {prompt}"

        assert (await session.execute("input('this')", on_input=on_input)).result == "'answer to this'"
        died = await session.execute("import os\nos._exit(3)")
        assert (died.status, died.state) == ("died", "lost")
        after = await session.execute("kept")
        assert "NameError" in (after.error or "")


async def test_a_kernel_that_knows_nothing_but_tcp(engine: belljar.Engine) -> None:
    async with engine.open_session("kernel:deno") as session:
        said = await session.execute("const kept: number = 41; console.log('said')")
        assert (said.status, said.stdout) == ("ok", "said\n")
        assert (await session.execute("kept + 1")).result == "42"
        raised = await session.execute("throw new Error('wilted')")
        assert (raised.status, raised.error) == ("error", "Error: wilted")
        shown = await session.execute("await Deno.jupyter.display({'text/html': '<b>bold</b>'}, {raw: true})")
        assert [(display.mime, display.text) for display in shown.displays] == [("text/html", "<b>bold</b>")]
        refused = await session.execute("await fetch('http://127.0.0.1:1/')")
        assert refused.status == "error"


async def test_a_kernel_that_nobody_installed_is_refused_with_those_there_are(engine: belljar.Engine) -> None:
    with pytest.raises(EnvironmentBroken, match="no Jupyter kernel is named 'fortran'") as caught:
        async with engine.open_session("kernel:fortran"):
            pass
    assert {"bash", "deno", "xpython"} <= set(caught.value.hint.removeprefix("Installed: ").split(", "))
