"""Installs into a layer, with uv on the host and with uv in a sandbox of its own: the same in every respect."""

import os
import subprocess
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

from belljar.environments import installs
from belljar.environments.base import Environment
from belljar.environments.installed_check import check_installed
from belljar.environments.installs import InstallOutcome, as_fields
from belljar.errors import InvalidArgument
from local_index import LocalIndex
from uv_sandboxes import open_uv_sandbox

pytestmark = pytest.mark.anyio

Install = Callable[..., Awaitable[list[InstallOutcome]]]
IS_LONG = bool(os.environ.get("BELLJAR_LONG"))
ON_HOST = (
    "test_a_package_and_what_it_needs_go_into_the_layer",
    "test_what_the_layer_has_gives_way_to_what_is_needed",
    "test_a_source_package_is_refused",
    "test_what_is_no_plain_requirement_is_refused",
    "test_a_name_that_looks_like_a_file_is_a_name",
    "test_links_planted_in_the_layer_lead_nowhere",
    "test_a_forged_list_of_files_removes_nothing_outside",
)


@pytest.fixture(params=["host", "sandbox"])
def install(request: pytest.FixtureRequest, index: LocalIndex) -> Install:
    """uv's two places. In a long run everything is tried on the host, too; otherwise what could differ there."""
    if request.param == "host":
        if not IS_LONG and not request.node.originalname.startswith(ON_HOST):
            pytest.skip("a long trial: BELLJAR_LONG=1 runs it; with uv in its sandbox it is tried anyway")
        return installs.install
    return partial(installs.install, open_uv=open_uv_sandbox().uv_for("s1"))


@pytest.fixture(autouse=True)
def town(index: LocalIndex, tmp_path: Path) -> None:
    """`house` depends on nothing; `street` on any house; `tower` on a new house; `hut` on an old one."""
    index.add_wheel("house", "1.0", {"house.py": "floors = 1\n"})
    index.add_wheel("house", "2.0", {"house.py": "floors = 2\n"})
    index.add_wheel("house", "3.0", {"house.py": "floors = 3\n"})
    index.add_wheel("lamp", "1.0", {"lamp/__init__.py": "watts = 1\n", "lamp/oil.py": ""})
    index.add_wheel("lamp", "2.0", {"lamp/__init__.py": "watts = 2\n", "lamp/led.py": ""})
    index.add_wheel("street", "1.0", {"street.py": ""}, ["house", "lamp"])
    index.add_wheel("tower", "1.0", {"tower.py": ""}, ["house>=3"])
    index.add_wheel("hut", "1.0", {"hut.py": ""}, ["house<2"])
    index.add_source("ruin", "1.0", f"open({str(tmp_path / 'it-ran')!r}, 'w')\n")


def run(environment: Environment, layer: Path, code: str) -> str:
    """What the code prints in the environment with the layer in front."""
    command = [str(environment.python), "-c", code]
    variables = {"PYTHONPATH": str(layer)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.strip()


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


async def test_a_package_and_what_it_needs_go_into_the_layer(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    before = tree(small_environment.python.parent.parent)

    assert await install(small_environment, layer, ["street"]) == [InstallOutcome("street", "1.0", None)]

    assert run(small_environment, layer, "import street, lamp, house; print(lamp.watts, house.floors)") == "2 1"
    assert tree(small_environment.python.parent.parent) == before
    # Compiled, private copies; the environment's own house is not among them, nor is anything of the installation.
    assert {path.name for path in layer.iterdir()} == {
        *("lamp", "lamp-2.0.dist-info", "street.py", "street-1.0.dist-info", "__pycache__")
    }
    assert list((layer / "lamp" / "__pycache__").glob("led.*.pyc"))
    assert {path.stat().st_nlink for path in layer.rglob("*.py")} == {1}
    assert {path.name for path in layer.parent.iterdir()} == {"layer", ".layer.lock"}


async def test_what_the_environment_has_is_not_installed_again(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    assert await install(small_environment, layer, ["House"]) == [InstallOutcome("House", "1.0", None)]

    assert not layer.exists()


async def test_a_version_the_environment_lacks_covers_its_own(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    assert await install(small_environment, layer, ["house==2.0"]) == [InstallOutcome("house", "2.0", None)]

    assert run(small_environment, layer, "import house; print(house.floors)") == "2"


async def test_the_version_of_the_environment_can_be_had_again(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    await install(small_environment, layer, ["house==2.0"])

    assert await install(small_environment, layer, ["house<2"]) == [InstallOutcome("house", "1.0", None)]

    assert run(small_environment, layer, "import house; print(house.floors)") == "1"


async def test_what_the_layer_has_stays_when_it_is_good_enough(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    await install(small_environment, layer, ["house==2.0", "lamp==1.0"])

    assert await install(small_environment, layer, ["street", "house"]) == [
        InstallOutcome("street", "1.0", None),
        InstallOutcome("house", "2.0", None),
    ]

    assert run(small_environment, layer, "import house, lamp; print(house.floors, lamp.watts)") == "2 1"


async def test_what_the_layer_has_gives_way_to_what_is_needed(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    await install(small_environment, layer, ["house==2.0"])

    await install(small_environment, layer, ["tower"])
    assert run(small_environment, layer, "import house; print(house.floors)") == "3"

    # The environment's own house would do, were it not covered by the layer's.
    await install(small_environment, layer, ["hut"])
    assert run(small_environment, layer, "import house; print(house.floors)") == "1"


async def test_an_upgrade_takes_the_old_files_away(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    await install(small_environment, layer, ["lamp==1.0"])
    (layer / "lamp" / "own_notes.txt").write_text("mine")

    await install(small_environment, layer, ["lamp>=2"])

    assert sorted(path.name for path in layer.glob("*.dist-info")) == ["lamp-2.0.dist-info"]
    files = sorted(path.name for path in (layer / "lamp").iterdir() if path.is_file())
    assert files == ["__init__.py", "led.py", "own_notes.txt"]


async def test_one_that_cannot_be_had_does_not_stop_the_others(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    street, castle, lamp = await install(small_environment, layer, ["street", "castle", "lamp<2"])

    assert (street, lamp) == (InstallOutcome("street", "1.0", None), InstallOutcome("lamp", "1.0", None))
    assert castle.installed_version is None
    assert castle.error is not None
    assert "castle was not found" in castle.error
    assert as_fields(castle) == {
        "name": "castle",
        "installed_version": None,
        "error": castle.error,
        "imported": None,
        "import_error": None,
    }


async def test_of_two_that_do_not_go_together_the_first_wins(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    tower, hut = await install(small_environment, layer, ["tower", "hut"])

    assert tower == InstallOutcome("tower", "1.0", None)
    assert hut.error is not None
    assert "house<2" in hut.error
    assert run(small_environment, layer, "import house; print(house.floors)") == "3"


async def test_a_source_package_is_refused_and_its_code_never_runs(
    install: Install, small_environment: Environment, layer: Path, tmp_path: Path
) -> None:
    (outcome,) = await install(small_environment, layer, ["ruin"])

    assert outcome.error is not None
    assert "no usable wheels" in outcome.error
    assert not (tmp_path / "it-ran").exists()


async def test_a_condition_that_does_not_hold_is_told(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    assert await install(small_environment, layer, ["lamp; python_version < '3'"]) == [
        InstallOutcome("lamp", None, 'its condition does not hold here: python_version < "3"')
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("", "-r requirements.txt", "--index-url=http://evil.test", "./lamp", "/tmp/lamp", "lamp -e .", "a b", "a\0b"),
        *("lamp @ file:///tmp/lamp", "git+https://evil.test/lamp", "https://evil.test/lamp.whl", "lamp\n--pre"),
    ],
)
async def test_what_is_no_plain_requirement_is_refused(
    install: Install, small_environment: Environment, layer: Path, text: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await install(small_environment, layer, ["house", text])

    assert caught.value.message == f"not a package to install: {text!r}"
    assert not layer.exists()


async def test_too_many_and_too_long_names_are_refused(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    with pytest.raises(InvalidArgument, match="201 packages"):
        await install(small_environment, layer, ["house"] * 201)
    with pytest.raises(InvalidArgument, match="501 characters"):
        await install(small_environment, layer, ["h" * 501])


async def test_a_name_that_looks_like_a_file_is_a_name(
    install: Install, small_environment: Environment, layer: Path
) -> None:
    (outcome,) = await install(small_environment, layer, ["lamp.whl"])

    assert outcome.error is not None
    assert "lamp-whl was not found" in outcome.error


async def test_links_planted_in_the_layer_lead_nowhere(
    install: Install, small_environment: Environment, layer: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim.py").write_text("precious")
    layer.mkdir()
    (layer / "lamp").symlink_to(outside)
    (layer / "street.py").symlink_to(outside / "victim.py")

    await install(small_environment, layer, ["street"])

    assert {path.name: path.read_text() for path in outside.iterdir()} == {"victim.py": "precious"}
    assert not (layer / "lamp").is_symlink()
    assert run(small_environment, layer, "import street, lamp; print(lamp.watts)") == "2"


async def test_a_forged_list_of_files_removes_nothing_outside(
    install: Install, small_environment: Environment, layer: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "session" / "victim.py"
    victim.write_text("precious")
    forged = layer / "lamp-1.0.dist-info"
    forged.mkdir(parents=True)
    (layer / "way").symlink_to(victim.parent)
    huge = '"' + "x" * 200_000
    (forged / "RECORD").write_text(f"../victim.py,,\n{victim},,\nway/victim.py,,\na\0b,,\n{huge}\n")

    assert await install(small_environment, layer, ["lamp>=2"]) == [InstallOutcome("lamp", "2.0", None)]

    assert victim.read_text() == "precious"


async def test_two_at_once_both_land(install: Install, small_environment: Environment, layer: Path) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(install, small_environment, layer, ["lamp"])
        tasks.start_soon(install, small_environment, layer, ["tower"])

    statuses = check_installed(small_environment, layer, ["lamp", "tower", "house>=3"])
    assert [status.installed for status in statuses] == [True, True, True]


async def test_the_time_limit_ends_it(
    install: Install, small_environment: Environment, layer: Path, silent_index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", silent_index)
    monkeypatch.setenv("UV_NO_CACHE", "1")

    (outcome,) = await install(small_environment, layer, ["lamp"], timeout_s=1)

    assert outcome.installed_version is None
    assert outcome.error is not None
    assert "1 s" in outcome.error
    assert {path.name for path in layer.parent.iterdir()} == {".layer.lock"}


async def test_nothing_is_written_to_stdout(
    install: Install, small_environment: Environment, layer: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await install(small_environment, layer, ["lamp"])

    assert capfd.readouterr() == ("", "")
