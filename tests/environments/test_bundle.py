"""Environments that travel as one file: made on one host, used on another that reaches no index."""

import asyncio
import gzip
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from belljar.environments import ipython_support, open_environment
from belljar.environments.bundle import BundlePart, bundle, unbundle
from belljar.errors import InvalidArgument
from belljar.settings import EnvironmentEntry, Settings
from local_index import LocalIndex, add_support
from shared_environment import settings_with

pytestmark = pytest.mark.anyio


def ignore(_: str) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Packed:
    """A bundle of the environment `lunch`, made on a host that is gone."""

    parts: list[BundlePart]
    content: bytes


LUNCH = EnvironmentEntry(kind="managed", requirements=("ham==1.5",))


def settings_of(folder: Path) -> Settings:
    return settings_with(environments={"lunch": LUNCH}, environment="lunch", data_directory=folder)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("one")
    (folder / "index").mkdir()
    index = LocalIndex(folder / "index")
    index.add_wheel("ham", "1.5", {"ham.py": "TASTE = 'salty'\n", "ham_data/fact.txt": "pink"})
    add_support(index)
    with pytest.MonkeyPatch.context() as patch:
        # The real IPython has thousands of files.
        patch.setattr(ipython_support, "own_packages", lambda *_: [])
        patch.setenv("UV_DEFAULT_INDEX", index.url)
        patch.setenv("UV_CACHE_DIR", str(folder / "cache"))
        parts = asyncio.run(bundle(settings_of(folder / "data"), ["lunch"], folder / "lunch.tar.gz", ignore))
    content = (folder / "lunch.tar.gz").read_bytes()
    shutil.rmtree(folder)
    return Packed(parts, content)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Another host, which reaches no index."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return settings_of(tmp_path / "other")


@pytest.fixture
def file(packed: Packed, tmp_path: Path) -> Path:
    (tmp_path / "lunch.tar.gz").write_bytes(packed.content)
    return tmp_path / "lunch.tar.gz"


async def test_an_environment_made_on_one_host_runs_on_another_without_an_index(
    packed: Packed, other: Settings, file: Path
) -> None:
    assert [(part.kind, part.name) for part in packed.parts] == [("environment", "lunch"), ("support", "lunch")]

    assert await unbundle(other, file, ignore) == packed.parts
    environment = await open_environment(other)

    assert environment.python.is_relative_to(other.data_directory)
    assert environment.support is not None
    look = "import ham, sys; print(ham.TASTE, open(ham.__file__.replace('ham.py', 'ham_data/fact.txt')).read())"
    said = subprocess.run([environment.python, "-I", "-c", look], capture_output=True, text=True, check=True).stdout
    assert said == "salty pink\n"
    left = [path.name for path in (other.data_directory / "environments").iterdir() if path.is_dir()]
    assert left == [environment.prefix.name]
    assert await unbundle(other, file, ignore) == [], "all of it is there already"


async def test_a_bundle_of_other_packages_or_another_python_is_refused_before_anything_is_changed(
    other: Settings, file: Path
) -> None:
    entry = EnvironmentEntry(kind="managed", requirements=("ham",))
    with pytest.raises(InvalidArgument, match="is made of other packages"):
        await unbundle(other.model_copy(update={"environments": {"lunch": entry}}), file, ignore)
    with pytest.raises(InvalidArgument, match="which these settings do not name"):
        await unbundle(other.model_copy(update={"environments": {}}), file, ignore)
    rewrite(file, lambda words: {**words, "tag": "cpython-39-linux-riscv64"})
    with pytest.raises(InvalidArgument, match="is for cpython-39-linux-riscv64"):
        await unbundle(other, file, ignore)
    assert not any((other.data_directory / "support").iterdir())
    assert not any((other.data_directory / "environments").iterdir())


async def test_a_file_that_was_cut_off_or_is_no_bundle_changes_nothing(other: Settings, file: Path) -> None:
    whole = file.read_bytes()
    for content in (whole[: len(whole) * 2 // 3], b"", b"PK", gzip.compress(b"hello" * 1000)):
        file.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"damaged, or no bundle|no bundle of belljar's"):
            await unbundle(other, file, ignore)
    assert not any((other.data_directory / "environments").iterdir())


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("0/../../../planted", ""),
        ("/planted", ""),
        ("7/planted", ""),
        ("0/out", "../../../.."),
        ("0/out", "/etc"),
        ("0/a/b/up/planted", "../../c"),
    ],
)
async def test_files_of_a_bundle_stay_in_it(other: Settings, file: Path, tmp_path: Path, name: str, link: str) -> None:
    way = name.removesuffix("/planted") if link else name
    rewrite(file, lambda words: words, extra=[(way, link), *([(name, "")] if way != name else [])])
    with pytest.raises(InvalidArgument, match=r"wrong name|leads out of it"):
        await unbundle(other, file, ignore)
    assert not [*tmp_path.rglob("planted")]


async def test_an_unknown_environment_is_not_bundled(other: Settings, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="unknown environment"):
        await bundle(other, ["elsewhere"], tmp_path / "nothing", ignore)
    assert not (tmp_path / "nothing").exists()


Words = dict[str, object]


def rewrite(file: Path, change: Callable[[Words], Words], extra: list[tuple[str, str]] | None = None) -> None:
    """Write a bundle again with another manifest, and with files and links that nobody put there."""
    with tarfile.open(file) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        with tarfile.open(file.with_suffix(".new"), "w:gz") as new:
            for member, content in members:
                text = content.read() if content else b""
                if member.name.endswith(".json") and "/" not in member.name:
                    text = json.dumps(change(json.loads(text))).encode()
                    member.size = len(text)
                new.addfile(member, io.BytesIO(text) if member.isfile() else None)
            for name, link in extra or []:
                member = tarfile.TarInfo(name)
                if link:
                    member.type, member.linkname = tarfile.SYMTYPE, link
                new.addfile(member)
    file.with_suffix(".new").replace(file)
