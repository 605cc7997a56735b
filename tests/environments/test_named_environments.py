"""Environments as the settings name them: found or made, refused when they are not there, asked for by name."""

import subprocess
import sys
from pathlib import Path

import pytest
from uv import find_uv_bin

from belljar.environments import check_configured, check_environments, known_names, open_environment
from belljar.environments.base import inspect_interpreter
from belljar.environments.installed_check import describe_packages
from belljar.environments.installs import install
from belljar.environments.lockfile import lock_of
from belljar.environments.managed import LOCK
from belljar.errors import EnvironmentBroken, InvalidArgument
from belljar.runtime import open_runtime
from belljar.settings import Settings
from local_index import LocalIndex, add_support
from shared_environment import settings_with, share_support

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> LocalIndex:
    index = LocalIndex(tmp_path_factory.mktemp("town"))
    add_support(index)
    index.add_wheel("house", "1.0", {"house.py": "floors = 1\n"}, requires=["brick"])
    index.add_wheel("house", "2.0", {"house.py": "floors = 2\n"}, requires=["brick"])
    index.add_wheel("brick", "0.5", {"brick.py": ""})
    return index


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that what environments lack is fetched once."""
    folder = tmp_path_factory.mktemp("data")
    share_support(folder, "made-up-support")
    return folder


@pytest.fixture(autouse=True)
def indexed(town: LocalIndex, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", town.url)
    monkeypatch.setenv("UV_CACHE_DIR", str(data / "cache"))


def naming(data: Path, **entries: object) -> Settings:
    return settings_with(data_directory=data, environments=entries)


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by uv, without pip."""
    folder = tmp_path_factory.mktemp("uv") / "venv"
    command = [find_uv_bin(), "venv", "-q", "--no-project", "--python", sys.executable, str(folder)]
    subprocess.run(command, check=True)
    return folder


async def test_each_kind_is_found_by_its_name_and_says_what_it_is(data: Path, venv: Path) -> None:
    settings = naming(
        data,
        one={"kind": "venv", "path": str(venv)},
        two={"kind": "venv-uv", "path": str(venv / "bin" / "python")},
        three={"kind": "system", "path": str(inspect_interpreter(Path(sys.executable)).executable.resolve())},
        four={"kind": "managed", "requirements": ["house<2"]},
    )

    opened = {name: await open_environment(settings, name) for name in settings.environments}

    assert {name: each.kind for name, each in opened.items()} == {
        "one": "venv",
        "two": "venv-uv",
        "three": "system",
        "four": "managed",
    }
    assert opened["one"].python == opened["two"].python == venv / "bin" / "python"
    assert all(each.version.startswith("3.") and each.name == name for name, each in opened.items())


async def test_the_system_python_is_the_hosts_and_not_the_first_on_the_path(
    data: Path, venv: Path, monkeypatch
) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("no /usr/bin/python3 on this host")
    monkeypatch.setenv("PATH", f"{venv / 'bin'}:/usr/bin:/bin")

    environment = await open_environment(naming(data, host={"kind": "system"}), "host")

    assert environment.python == Path("/usr/bin/python3").resolve()


async def test_a_name_that_the_settings_do_not_have_is_refused_with_those_they_have(data: Path, venv: Path) -> None:
    settings = naming(data, geo={"kind": "venv", "path": str(venv)})

    with pytest.raises(InvalidArgument) as caught:
        await open_environment(settings, "gone")

    assert caught.value.hint == "Use default or geo, or kernel:NAME for a Jupyter kernel"
    assert known_names(settings) == ["default", "geo"]


async def test_a_managed_one_is_made_once_from_its_list_and_pinned(data: Path) -> None:
    settings = naming(
        data,
        small={"kind": "managed", "requirements": ["house==1.0"]},
        same={"kind": "managed", "requirements": ["house==1.0"]},
        other={"kind": "managed", "requirements": ["house"]},
    )
    lines: list[str] = []

    small = await open_environment(settings, "small", on_progress=lines.append)
    same = await open_environment(settings, "same", on_progress=lines.append)
    other = await open_environment(settings, "other")

    assert small.python == same.python != other.python
    assert sum(line.startswith("preparing the ") for line in lines) == 1
    root = small.python.parent.parent
    assert (root / LOCK).read_text() == "brick==0.5\nhouse==1.0\n"
    assert describe_packages(small).packages == {"brick": "0.5", "house": "1.0"}
    assert describe_packages(other).packages["house"] == "2.0"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("requirements.txt", "house==1.0  # the old one\n"),
        ("pyproject.toml", '[project]\nname = "x"\nrequires-python = ">=3.9"\ndependencies = ["house<2"]\n'),
        ("environment.yml", "dependencies: [house=1]\n"),
    ],
)
async def test_a_managed_one_is_made_of_a_file(data: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)

    environment = await open_environment(naming(data, it={"kind": "managed", "file": str(tmp_path / name)}), "it")

    assert describe_packages(environment).packages["house"] == "1.0"


async def test_the_resolver_is_quoted_in_full_when_it_cannot_be_made(data: Path) -> None:
    settings = naming(data, it={"kind": "managed", "requirements": ["house>5"]})

    with pytest.raises(EnvironmentBroken) as caught:
        await open_environment(settings, "it")

    assert "the it environment could not be made" in caught.value.message
    assert "house<=2.0 is available" in caught.value.message


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"kind": "venv", "path": "/no/such"}, "environment it: no such environment: /no/such"),
        ({"kind": "venv", "path": "/usr"}, "environment it: /usr is not a virtual environment: "),
        ({"kind": "conda", "path": "no-such-one"}, "environment it: no conda environment is called no-such-one"),
        ({"kind": "conda", "path": "/usr"}, "environment it: /usr is not a conda environment"),
        ({"kind": "managed", "file": "/no/requirements.txt"}, "environment it: /no/requirements.txt cannot be read"),
    ],
)
async def test_one_that_is_not_there_is_an_error_before_anything_is_served(
    data: Path, entry: dict[str, str], complaint: str
) -> None:
    with pytest.raises(EnvironmentBroken) as caught:
        async with open_runtime(naming(data, it=entry)):
            raise AssertionError("it opened")

    assert caught.value.message.startswith(complaint)
    assert caught.value.hint
    assert not (data / "runs").exists()


async def test_a_broken_interpreter_is_an_error_then_too(data: Path, venv: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho no library today >&2; exit 3\n")
    (tmp_path / "bin" / "python").chmod(0o755)

    with pytest.raises(EnvironmentBroken, match=r"environment it: .* does not run: no library today"):
        await check_configured(naming(data, it={"kind": "venv", "path": str(tmp_path)}))


async def test_a_managed_one_that_is_not_made_yet_is_no_error(tmp_path: Path) -> None:
    settings = naming(tmp_path / "fresh", it={"kind": "managed", "requirements": ["house"]})

    await check_configured(settings)

    *_, check = check_environments(settings)
    assert (check.name, check.is_ok, check.hint) == ("environment it", True, "Run: belljar env create it")
    assert not (tmp_path / "fresh").exists()


async def test_doctor_has_a_line_for_each(data: Path, venv: Path) -> None:
    settings = naming(data, good={"kind": "venv", "path": str(venv)}, bad={"kind": "venv", "path": "/no/such"})

    *_, good, bad = check_environments(settings)

    assert good.is_ok
    assert good.detail.startswith("venv, Python 3.")
    assert good.detail.endswith("; IPython is brought along")
    assert (bad.is_ok, bad.detail) == (False, "no such environment: /no/such")


async def test_a_lock_makes_the_same_packages_again(data: Path, tmp_path: Path) -> None:
    first = await open_environment(naming(data, it={"kind": "managed", "requirements": ["brick"]}), "it")
    (tmp_path / "session").mkdir()
    layer = tmp_path / "session" / "layer"
    await install(first, layer, ["house==1.0"])

    (tmp_path / "session.lock").write_text(lock_of(first, layer))
    entry = {"kind": "managed", "file": str(tmp_path / "session.lock")}
    again = await open_environment(naming(data, again=entry), "again")

    assert describe_packages(again).packages == {"brick": "0.5", "house": "1.0"}
