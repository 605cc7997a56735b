import os
from pathlib import Path

import pytest

from belljar.environments.base import Environment
from belljar.environments.installed_check import PackageStatus, check_installed
from belljar.environments.installs import as_fields
from belljar.errors import InvalidArgument


def claim(folder: Path, name: str, version: str, record: str = "") -> Path:
    """Metadata as an installer leaves it."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "RECORD").write_text(record)
    return metadata


def test_distribution_names_import_names_and_versions_are_understood(default_environment: Environment) -> None:
    names = ["scikit-learn", "Scikit_Learn", "sklearn", "PIL", "pandas>=2", "requests[socks]>2,<99", "json", "dateutil"]

    statuses = check_installed(default_environment, None, names)

    assert [status.name for status in statuses] == names
    assert [status.installed for status in statuses] == [True] * len(names)
    by_name = {status.name: status for status in statuses}
    assert by_name["sklearn"].version == by_name["scikit-learn"].version == by_name["Scikit_Learn"].version
    assert by_name["sklearn"].note == "imported as sklearn, installed by scikit-learn"
    assert by_name["PIL"].note == "imported as PIL, installed by pillow"
    assert by_name["json"] == PackageStatus("json", True, note="part of Python's standard library")
    location = by_name["pandas>=2"].location
    assert location is not None
    assert Path(location).is_relative_to(default_environment.python.parent.parent)


def test_what_is_not_there_is_not_there(default_environment: Environment) -> None:
    names = ["castle", "castle.keep", "pandas.castle", "!!", "", "a b", "x @ https://evil.test/x.whl", "../pandas"]

    statuses = check_installed(default_environment, None, names)

    assert [(status.installed, status.version) for status in statuses] == [(False, None)] * len(names)
    assert statuses[3].note == "not a package name"


def test_an_unfit_version_is_told(small_environment: Environment) -> None:
    (status,) = check_installed(small_environment, None, ["house>=9"])

    assert (status.installed, status.version, status.note) == (False, "1.0", "house 1.0 is not >=9")


def test_the_layer_comes_first(small_environment: Environment, layer: Path) -> None:
    claim(layer, "house", "2.0")

    (status,) = check_installed(small_environment, layer, ["house"])

    assert as_fields(status) == {
        "name": "house",
        "installed": True,
        "version": "2.0",
        "location": str(layer),
        "note": "",
    }


def test_modules_of_every_kind_are_found_with_their_owners(small_environment: Environment, layer: Path) -> None:
    claim(layer, "town_hall", "1.5", "hall/__init__.py,,\nbell.py,,\nclock.cpython-311-x86_64-linux-gnu.so,,\n")
    (layer / "hall").mkdir()
    for name in ("bell.py", "clock.cpython-311-x86_64-linux-gnu.so", "stray.py"):
        (layer / name).touch()

    hall, bell, clock, stray = check_installed(small_environment, layer, ["hall", "bell>1", "clock", "stray"])

    assert [status.version for status in (hall, bell, clock)] == ["1.5"] * 3
    assert hall.note == "imported as hall, installed by town-hall"
    assert (stray.installed, stray.version) == (True, None)
    assert stray.note == "a module that no package claims, so its version is unknown"


def test_a_layer_that_is_not_there_yet_is_empty(small_environment: Environment, layer: Path) -> None:
    (status,) = check_installed(small_environment, layer, ["house"])

    assert (status.installed, status.version) == (True, "1.0")


@pytest.mark.timeout(20)
def test_a_hostile_layer_neither_holds_nor_misleads(
    small_environment: Environment, layer: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    secret = claim(outside, "secret", "1.0", "secret.py,,\n")
    (outside / "secret.py").touch()
    layer.mkdir()
    (layer / "secret-1.0.dist-info").symlink_to(secret)
    (layer / "secret.py").symlink_to(outside / "secret.py")
    (layer / "door").symlink_to(outside)
    (layer / "bad name-1.0.dist-info").mkdir()
    (layer / "versionless-<script>.dist-info").mkdir()
    pipe = claim(layer, "pipe", "1.0")
    (pipe / "RECORD").unlink()
    os.mkfifo(pipe / "RECORD")
    (layer / "water").mkdir()
    vast = claim(layer, "vast", "1.0")
    os.truncate(vast / "RECORD", 1 << 40)

    names = ["secret", "door", "door.secret", "versionless", "water", "pipe", "vast"]
    statuses = check_installed(small_environment, layer, names)

    assert [status.installed for status in statuses] == [False, False, False, False, True, True, True]
    assert statuses[4].version is None


def test_nothing_is_imported(small_environment: Environment, layer: Path, tmp_path: Path) -> None:
    claim(layer, "trap", "1.0", "trap.py,,\n")
    (layer / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    (layer / "sitecustomize.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")

    (status,) = check_installed(small_environment, layer, ["trap"])

    assert status.installed
    assert not (tmp_path / "sprung").exists()


def test_too_many_names_are_refused(small_environment: Environment) -> None:
    with pytest.raises(InvalidArgument, match="201 packages"):
        check_installed(small_environment, None, ["house"] * 201)
