"""Environments and packages as a client asks for them."""

import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from calls import Caller, connected, opened_runtime, text_of

from belljar.environments import Environment
from belljar.errors import EnvironmentBroken
from belljar.runtime import Runtime, open_runtime
from belljar.settings import EnvironmentEntry
from local_index import LocalIndex
from shared_environment import settings_with

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> LocalIndex:
    folder = tmp_path_factory.mktemp("index")
    folder.chmod(0o755)
    index = LocalIndex(folder)
    index.add_wheel("house", "1.0", {"house.py": "floors = 1\n"}, requires=["brick"])
    index.add_wheel("brick", "0.5", {"brick.py": ""})
    return index


@pytest.fixture(scope="module")
def second(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that is not the configured one, with the other's packages behind its own."""
    folder = tmp_path_factory.mktemp("second") / "venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (theirs,) = default_environment.python.parent.parent.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text(f"{theirs}\n")
    (packages / "second.py").write_text("here = True\n")
    return folder


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str,
    default_environment: Environment,
    second: Path,
    index: LocalIndex,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Runtime]:
    entries = {"second": EnvironmentEntry(kind="venv", path=str(second))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_DEFAULT_INDEX", index.url)
        for name in ("UV_FIND_LINKS", "UV_INDEX"):
            patch.delenv(name, raising=False)
        folder = tmp_path_factory.mktemp("belljar")
        async with opened_runtime(default_environment, folder, environments=entries) as runtime:
            yield runtime


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncGenerator[Caller]:
    async with connected(runtime) as caller:
        yield caller


async def test_a_session_runs_in_the_environment_it_asked_for_by_name(caller: Caller, second: Path) -> None:
    info = await caller.fields("new_session", environment="second")

    result = await caller.execute("import second, sys; print(second.here); sys.prefix", info["session_id"])

    assert info["environment"] == "second"
    assert (result.stdout, result.result) == ("True\n", repr(str(second)))


async def test_without_a_name_it_is_the_configured_one(caller: Caller, second: Path) -> None:
    result = await caller.execute("import sys; sys.prefix == " + repr(str(second)))

    assert result.result == "False"


@pytest.mark.parametrize("name", ["nowhere", "/usr", "../second", "second "])
async def test_another_name_is_refused_with_those_there_are(
    caller: Caller, name: str, runtime: Runtime, default_environment: Environment
) -> None:
    refused = await caller.refusal("new_session", environment=name)

    known = f"default or {default_environment.python} or second"
    assert refused == f"invalid-argument: unknown environment: {name}. Use {known}, or kernel:NAME for a Jupyter kernel"


async def test_what_is_installed_is_pinned_with_its_dependencies_and_told_on_the_way(caller: Caller) -> None:
    session_id = await caller.new_session()
    stages: list[str] = []

    async def on_progress(_progress: float, _total: float | None, message: str | None) -> None:
        stages.append(message or "")

    answer = await caller.client.call_tool(
        "install_dependencies", {"packages": ["house"], "session_id": session_id}, progress_callback=on_progress
    )

    assert not answer.is_error, text_of(answer)
    assert answer.structured_content is not None
    assert answer.structured_content["pinned"] == ["brick==0.5", "house==1.0"]
    assert "installed: brick==0.5 house==1.0" in text_of(answer)
    assert [stage.split()[0] for stage in stages] == ["resolving", "fetching", "importing"]


async def test_packages_are_looked_for_by_any_name_in_a_session_or_in_a_new_ones(caller: Caller) -> None:
    session_id = await caller.new_session()
    await caller.fields("install_dependencies", packages=["house"], session_id=session_id)
    names = ["scikit-learn", "sklearn", "pandas>=2", "pandas<1", "json", "house"]

    fresh = await caller.fields("check_installed_packages", packages=names)
    own = await caller.fields("check_installed_packages", packages=names, session_id=session_id)

    assert [each["installed"] for each in fresh["packages"]] == [True, True, True, False, True, False]
    assert [each["installed"] for each in own["packages"]] == [True, True, True, False, True, True]
    assert own["session_id"] == session_id
    text = text_of(await caller.call("check_installed_packages", packages=["sklearn", "pandas<1", "json"]))
    assert "(imported as sklearn, installed by scikit-learn)" in text
    assert "is not <1)" in text
    assert "json: there (part of Python's standard library)" in text


async def test_the_resolver_is_quoted(caller: Caller) -> None:
    refused = await caller.refusal("install_dependencies", packages=["house>7"], session_id=await caller.new_session())

    assert "only house" in refused
    assert "house>7" in refused


async def test_a_kernel_that_is_not_installed_is_refused_before_a_session_is_made(runtime: Runtime) -> None:
    await runtime.starter.environments.get(runtime.settings.environment)
    with pytest.raises(EnvironmentBroken, match="no Jupyter kernel is named 'tulip'") as caught:
        runtime.sessions.create("local", environment="kernel:tulip")
    assert caught.value.hint.startswith(("Installed: ", "None is installed"))


async def test_a_kernel_of_the_settings_that_is_not_installed_is_said_at_the_start(
    default_environment: Environment,
) -> None:
    data = default_environment.python.parents[3]
    with pytest.raises(EnvironmentBroken, match="no Jupyter kernel is named 'tulip'"):
        async with open_runtime(settings_with(data_directory=data, environment="kernel:tulip")):
            pass
