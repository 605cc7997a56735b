"""pip where uv is missing: the same installation, by the environment's own."""

import ensurepip
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from belljar.environments.base import Environment, describe, inspect_interpreter
from belljar.environments.installs import Change, InstallOutcome, install
from belljar.environments.pip import open_pip_on_host
from belljar.errors import EnvironmentBroken
from local_index import LocalIndex

pytestmark = pytest.mark.anyio

_DEBIAN = "python-wheels/pip-*.whl"


@pytest.fixture(scope="module")
def with_pip(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("pip") / "venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    wheels = [*Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"), *Path("/usr/share").glob(_DEBIAN)]
    if not wheels:
        pytest.skip("this Python comes without pip")
    # Unpacked rather than installed, which takes several seconds.
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(packages)
    return describe("with-pip", inspect_interpreter(folder / "bin" / "python"))


@pytest.fixture
def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalIndex:
    """An index that pip is told of, and nothing else."""
    (tmp_path / "index").mkdir()
    index = LocalIndex(tmp_path / "index")
    index.add_wheel("tall-house", "2.0", {"house.py": "floors = 2\n"}, requires=["brick"])
    index.add_wheel("brick", "0.5", {"brick.py": ""})
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    return index


async def test_what_is_lacking_is_put_into_the_layer_with_its_dependencies(
    town: LocalIndex, with_pip: Environment, layer: Path
) -> None:
    changes: list[Change] = []

    outcomes = await install(with_pip, layer, ["tall-house>=1"], on_change=changes.append, open_uv=open_pip_on_host)

    assert outcomes == [InstallOutcome("tall-house", "2.0", None)]
    assert sorted(changes, key=lambda change: change.name) == [
        Change("brick", None, "0.5"),
        Change("tall-house", None, "2.0"),
    ]
    assert (layer / "house.py").is_file()


async def test_its_resolver_is_quoted_and_the_others_are_installed(
    town: LocalIndex, with_pip: Environment, layer: Path
) -> None:
    castle, brick = await install(with_pip, layer, ["castle", "brick"], open_uv=open_pip_on_host)

    assert castle.error is not None
    assert "No matching distribution found for castle" in castle.error
    assert brick == InstallOutcome("brick", "0.5", None)


async def test_an_environment_without_pip_says_what_to_do(
    town: LocalIndex, small_environment: Environment, layer: Path
) -> None:
    with pytest.raises(EnvironmentBroken) as caught:
        await install(small_environment, layer, ["brick"], open_uv=open_pip_on_host)

    assert caught.value.message == f"uv is missing, and {small_environment.python} has no pip"
