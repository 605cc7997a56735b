"""Packages of conda for sessions: a real channel on loopback, solved and installed by rattler in its sandbox."""

import base64
import json
import os
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import platformdirs
import pytest
from anyio import to_thread
from conda_channel import PLACEHOLDER, Channel, compiled, python_package
from mcp import Client
from packaging.requirements import Requirement

from belljar.cli import env
from belljar.environments import open_environment
from belljar.environments.base import Environment, describe, inspect_interpreter
from belljar.environments.catalogue import examine, managed_folder, unused_folders
from belljar.environments.conda.channels import channel_rules, channel_urls, channels_of
from belljar.environments.conda.installs import WORK, specs_of
from belljar.environments.conda.prefix import relocate
from belljar.environments.installed_check import check_installed, modules_of
from belljar.environments.installs import InstallOutcome, PackageChange, as_fields, check_requirements, install
from belljar.environments.uv import OpenUv, open_uv_on_host
from belljar.errors import EnvironmentBroken, InvalidArgument, SettingsError
from belljar.mcp.server import build_server
from belljar.python.local import open_engine
from belljar.runtime import open_runtime
from belljar.settings import EnvironmentEntry, Settings
from local_index import LocalIndex
from shared_environment import settings_with, share_support
from uv_sandboxes import open_uv_sandbox

_POND = """
import ctypes, pathlib
depth = ctypes.CDLL(str(pathlib.Path(__file__).parents[3] / "libpond.so.1")).depth()
"""
_LOOK = """
import frogs, subprocess, sys
print(frogs.depth, subprocess.run("shed", capture_output=True, text=True).stdout, end="")
print(open(next(path for path in sys.path if ".conda" in path) + "/../../../share/shed/where.txt").read(), end="")
"""
_SHED = "import sys, house\ndef main():\n    print('shed', house.floors, sys.prefix)\n"


class _Quiet(SimpleHTTPRequestHandler):
    password = ""

    def do_GET(self) -> None:
        expected = "Basic " + base64.b64encode(f"user:{self.password}".encode()).decode()
        if self.password and self.headers.get("Authorization") != expected:
            self.send_error(401)
        else:
            super().do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path, password: str = "") -> Iterator[str]:
    kind = type("Site", (_Quiet,), {"password": password})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://localhost:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@dataclass(frozen=True)
class Town:
    """A conda environment with big-house and libgarden, the channel they came from, and an index of wheels."""

    environment: Environment
    index: str

    @property
    def prefix(self) -> Path:
        return self.environment.prefix

    @property
    def channel(self) -> str:
        return self.environment.channels[0]

    @property
    def mirror(self) -> str:
        """Where `conda-forge` is that channel."""
        return self.channel.removesuffix("/conda-forge")


def fill(channel: Channel, folder: Path) -> None:
    channel.add_python()
    house = python_package("big_house", "1.0", {"house/__init__.py": "floors = 1\n"})
    channel.add("big-house", "1.0", house, depends=["python"], is_python=True)
    library = compiled("int flowers(void) { return 3; }", folder, "libgarden.so.3")
    for version in ("3.2", "4.0"):
        channel.add("libgarden", version, {"lib/libgarden.so.3": library})
    source = "int flowers(void); int depth(void) { return flowers() + 4; }"
    pond = compiled(source, folder, "libpond.so.1", "-L", str(folder), "-l:libgarden.so.3")
    channel.add("libpond", "1.1", {"lib/libpond.so.1": pond}, depends=["libgarden >=3,<4"])
    files = python_package("pond_of_frogs", "2.0", {"frogs/__init__.py": _POND})
    files = {path.replace("site-packages", channel.site_packages): content for path, content in files.items()}
    channel.add("pond", "2.0", files, depends=["python", "libpond"])
    for version, needs in (("1.0", "libgarden"), ("2.0", "libgarden >=4")):
        files = python_package("shed", version, {"shed.py": _SHED})
        files["share/shed/where.txt"] = f"{PLACEHOLDER}/share/shed {version}\n".encode()
        channel.add(
            *("shed", version, files), depends=["python", needs], is_python=True, entry_points=["shed = shed:main"]
        )
    channel.add("kite", "1.0", python_package("kite", "1.0", {"kite.py": ""}), depends=["python"], is_python=True)
    channel.add("torn", "1.0", {"share/torn": b""})
    channel.add("kite", "1.5", python_package("kite", "1.5", {"kite.py": ""}), depends=["python"], is_python=True)


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("conda")
    folder.chmod(0o755)
    (folder / "index").mkdir()
    index = LocalIndex(folder / "index")
    index.add_wheel("lamp", "1.0", {"lamp.py": "watts = 1\n"}, requires=["kite"])
    index.add_wheel("kite", "1.0", {"kite.py": ""})
    index.add_wheel("shed", "9.0", {"shed.py": "another = True\n"})
    index.add_wheel("torn", "9.0", {"torn.py": ""})
    index.add_wheel("ipython", "9.0", {"IPython.py": ""})
    channel = Channel(folder / "channel")
    fill(channel, folder)
    (folder / "mirror").mkdir()
    (folder / "mirror" / "conda-forge").symlink_to(folder / "channel")
    with pytest.MonkeyPatch.context() as patch, serving(folder / "mirror") as mirror:
        url = f"{mirror}/conda-forge"
        patch.setenv("XDG_CACHE_HOME", str(platformdirs.user_cache_path()))
        patch.setenv("HOME", str(folder))
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        prefix = folder / "envs" / "town"
        specs = ("python", "big-house", "libgarden <4")
        anyio.run(partial(channel.install, prefix, *specs, cache=folder / "cache"))
        (folder / "channel" / "linux-64" / "torn-1.0-0.tar.bz2").unlink()
        interpreter = inspect_interpreter(prefix / "bin" / "python")
        patch.setenv("UV_DEFAULT_INDEX", index.url)
        yield Town(describe("town", interpreter, kind="conda", channels=(url,)), index.url)


@pytest.fixture(scope="module")
def wheels(town: Town) -> OpenUv:
    """Installs in a sandbox, with the wheels of the index."""
    return open_uv_sandbox().uv_for("s1")


@pytest.mark.anyio
async def test_what_a_channel_has_comes_from_there_and_the_rest_from_the_index(
    town: Town, wheels: OpenUv, layer: Path
) -> None:
    changes: list[PackageChange] = []
    stages: list[str] = []

    async def hear(stage: str) -> None:
        stages.append(stage)

    wanted = ["pond", "kite<1.5", "lamp", "libgarden"]
    pond, kite, lamp, garden = await install(
        town.environment, layer, wanted, on_change=changes.append, on_stage=hear, open_uv=wheels
    )

    assert pond == InstallOutcome("pond", "2.0", None, source="conda")
    assert kite == InstallOutcome("kite", "1.0", None, source="conda")
    assert lamp == InstallOutcome("lamp", "1.0", None, source="pypi", note=f"conda: no lamp in {town.channel}")
    assert garden == InstallOutcome("libgarden", "3.2", None)
    assert sorted(change.pin for change in changes) == ["kite=1.0=0", "lamp==1.0", "libpond=1.1=0", "pond=2.0=0"]
    assert stages == ["resolving pond, kite, lamp, libgarden", "fetching lamp==1.0"]
    assert as_fields(lamp)["source"] == "pypi"
    statuses = check_installed(town.environment, layer, ["libpond>=1", "pond-of-frogs", "frogs", "pond"])
    assert [status.version for status in statuses] == ["1.1", "2.0", "2.0", "2.0"]
    assert modules_of(town.environment, layer, ["pond", "lamp"]) == {"pond": ["frogs"], "lamp": ["lamp"]}


@pytest.mark.anyio
async def test_what_does_not_go_with_the_environment_is_refused_in_the_solvers_words(
    town: Town, wheels: OpenUv, layer: Path
) -> None:
    shed, kite = await install(town.environment, layer, ["shed>=2", "kite"], open_uv=wheels)

    assert shed.installed_version is None
    assert shed.error is not None
    assert "shed 2.0 would require" in shed.error
    assert "libgarden 3.2 is locked" in shed.error
    assert shed.error.endswith(f"to install: conda install -p {town.prefix} 'shed>=2'")
    assert kite == InstallOutcome("kite", "1.5", None, source="conda")


@pytest.mark.anyio
async def test_another_version_takes_the_place_of_the_first_wherever_each_came_from(
    town: Town, wheels: OpenUv, layer: Path
) -> None:
    _, shed = await install(town.environment, layer, ["kite<1.5", "shed[all]"], open_uv=wheels)
    assert (shed.source, shed.note) == ("pypi", "conda: it knows no extras or conditions")
    changes: list[PackageChange] = []
    outcomes = await install(town.environment, layer, ["kite>=1.5", "shed<2"], on_change=changes.append, open_uv=wheels)

    assert [(each.installed_version, each.source) for each in outcomes] == [("1.5", "conda"), ("1.0", "conda")]
    assert sorted((each.name, each.before, each.after) for each in changes) == [
        ("kite", "1.0", "1.5"),
        ("shed", "9.0", "1.0"),
    ]
    records = sorted(file.name for file in (layer / ".conda" / "conda-meta").glob("*.json"))
    assert records == ["kite-1.5-0.json", "shed-1.0-0.json"]
    assert not (layer / "shed.py").exists()


@pytest.mark.anyio
async def test_no_wheel_undoes_what_was_asked_of_conda_or_takes_its_name(
    town: Town, wheels: OpenUv, layer: Path
) -> None:
    kite, lamp = await install(town.environment, layer, ["kite>=1.5", "lamp"], open_uv=wheels)
    (torn,) = await install(town.environment, layer, ["torn"], open_uv=wheels)

    assert kite == InstallOutcome("kite", "1.5", None, source="conda")
    assert "kite>=1.5" in (lamp.error or "")
    assert (torn.error or "").startswith("the packages cannot be fetched: ")
    assert not (layer / "kite.py").exists()
    assert not (layer / "torn.py").exists()


@pytest.mark.anyio
async def test_records_that_a_session_wrote_send_the_solver_nowhere(town: Town, layer: Path) -> None:
    await install(town.environment, layer, ["kite<1.5"])
    meta = layer / ".conda" / "conda-meta"
    record = json.loads((meta / "kite-1.0-0.json").read_text())
    for name, version in (("kite", "0.9"), ("libgarden", "3.0")):
        forged = {**record, "name": name, "version": version, "url": f"file:///nowhere/{name}.conda"}
        (meta / f"{name}-{version}-0.json").write_text(json.dumps(forged))

    (pond,) = await install(town.environment, layer, ["pond"])
    (meta / "kite-1.0-0.json").write_text("none")
    (shed,) = await install(town.environment, layer, ["shed"])

    assert pond == InstallOutcome("pond", "2.0", None, source="conda")
    assert shed.note.startswith("conda: kite-1.0-0.json in conda-meta is no record of a package: ")


@pytest.mark.anyio
async def test_a_package_that_claims_files_of_the_host_leaves_them_alone(
    town: Town, layer: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    channel = Channel(tmp_path / "channel")
    channel.add("thief", "1.0", {"share/thief": b""}, claimed={"../" * 40 + str(victim).lstrip("/"): b"mine"})
    await channel.index()
    environment = replace(town.environment, channels=(channel.url,))
    await install(environment, layer, ["thief"], open_uv=open_uv_on_host)
    assert victim.read_text() == "mine"


def test_a_copied_prefix_gets_its_own_paths_and_nothing_outside_is_written(tmp_path: Path) -> None:
    origin, layer = tmp_path / "one", tmp_path / "two"
    (meta := layer / ".conda" / "conda-meta").mkdir(parents=True)
    names = ("script", "empty", "pipe", "link", "../../outside", "nowhere/file")
    paths = [{"_path": name, "prefix_placeholder": PLACEHOLDER} for name in names]
    (meta / "a-1-0.json").write_text(json.dumps({"paths_data": {"paths": paths}}))
    for file in (tmp_path / "outside", meta.parent / "script"):
        file.write_text(f"{origin}/.conda/bin {origin}/.conda")
    (meta.parent / "empty").touch()
    os.mkfifo(meta.parent / "pipe")
    (meta.parent / "link").symlink_to(tmp_path / "outside")

    relocate(layer, origin)

    assert (meta.parent / "script").read_text() == f"{layer}/.conda/bin {layer}/.conda"
    assert (tmp_path / "outside").read_text() == f"{origin}/.conda/bin {origin}/.conda"


@pytest.mark.anyio
async def test_a_channel_that_is_not_there_leaves_wheels_and_says_so(town: Town, wheels: OpenUv, layer: Path) -> None:
    nowhere = replace(town.environment, channels=("http://localhost:9/nowhere",))

    lamp, garden = await install(nowhere, layer, ["lamp", "libtree"], open_uv=wheels)

    assert (lamp.installed_version, lamp.source) == ("1.0", "pypi")
    assert lamp.note.startswith("conda: the channels cannot be read: ")
    assert "http://localhost:9/nowhere" in lamp.note
    assert "the channels cannot be read" in (garden.error or "")
    assert "libtree" in (garden.error or "").partition("conda:")[0]


@pytest.mark.anyio
async def test_a_channels_password_is_taken_from_netrc_and_left_out_of_what_sessions_see(
    town: Town, wheels: OpenUv, layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine localhost login user password opensesame\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(town.prefix.parents[1] / "channel", password="opensesame") as url:
        closed = replace(town.environment, channels=(url,))
        (kite,) = await install(closed, layer, ["kite"], open_uv=wheels)

    assert kite == InstallOutcome("kite", "1.5", None, source="conda")
    assert "opensesame" not in (layer / ".conda" / "conda-meta" / "kite-1.5-0.json").read_text()


@pytest.mark.anyio
async def test_without_the_extra_there_are_wheels_and_the_way_to_more(
    town: Town, wheels: OpenUv, layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.environments.conda.installs.find_rattler", lambda: None)

    (lamp,) = await install(town.environment, layer, ["lamp"], open_uv=wheels)

    assert lamp.source == "pypi"
    assert lamp.note == "conda: conda's channels are not looked at without: pip install 'belljar-mcp[conda]'"


@pytest.mark.anyio
async def test_sessions_use_them_sealed_off_and_their_forks_too(
    town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_uv_sandbox()  # skips where nothing can be sealed off
    data = tmp_path / "data"
    share_support(data)
    entry = {"kind": "conda", "path": str(town.prefix)}
    settings = settings_with(
        data_directory=data, environment="town", environments={"town": entry}, conda_channels=[town.channel]
    )
    with monkeypatch.context() as patch:
        patch.delenv("UV_DEFAULT_INDEX")
        assert (await _opened(settings)).channels == (town.channel,)
    before = subprocess.run(["find", town.prefix], capture_output=True, check=True).stdout

    async with open_engine(settings) as engine, engine.open_session() as session:
        await session.execute("1", timeout_s=60)
        outcomes = await session.install(["pond", "shed", "lamp"])
        result = await session.execute(_LOOK, timeout_s=60)
        fork = await session.fork()
        forked = await fork.execute(_LOOK, timeout_s=60)
        layers = [data / "sessions" / each.id / "layer" for each in (session, fork)]
        assert await to_thread.run_sync(env.lock, settings, session.id) == 0

    assert [(each.name, each.imported, each.import_error) for each in outcomes] == [
        ("pond", True, None),
        ("shed", True, None),
        ("lamp", True, None),
    ]
    for layer, answer in zip(layers, (result, forked), strict=True):
        assert "".join(answer.output) == f"7 shed 1 {town.prefix}\n{layer}/.conda/share/shed 1.0\n"
    assert subprocess.run(["find", town.prefix], capture_output=True, check=True).stdout == before
    await _made_again(capsys.readouterr().out, settings, town, tmp_path)


@pytest.mark.anyio
async def test_the_executor_surface_has_them_too(town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_uv_sandbox()
    share_support(tmp_path / "data")
    monkeypatch.setenv("CONDA_ENV_NAME", str(town.prefix))
    settings = settings_with(
        data_directory=tmp_path / "data",
        environment=str(town.prefix),
        surfaces=["executor"],
        conda_channels=[town.channel],
        fork_start=False,
    )
    with monkeypatch.context() as patch:
        patch.delenv("UV_DEFAULT_INDEX")
        await _opened(settings)

    async with open_runtime(settings) as runtime, Client(build_server(runtime, ["executor"])) as client:
        installed = (await client.call_tool("install_dependencies", {"packages": ["pond", "lamp"]})).structured_content
        ran = (await client.call_tool("execute_code", {"code": "import frogs\nprint(frogs.depth)"})).structured_content
        names = {"packages": ["libpond", "libgarden>=3", "castle"]}
        there = (await client.call_tool("check_installed_packages", names)).structured_content

    assert installed is not None
    assert installed["installed_packages"] == ["pond==2.0", "lamp==1.0"]
    assert installed["sources"] == {"pond": "conda", "lamp": "pypi"}
    assert (ran or {})["output"] == "7\n"
    assert (there or {})["not_installed"] == ["castle"]


async def _opened(settings: Settings) -> Environment:
    """The environment of the settings; skips where the IPython that it lacks cannot be fetched."""
    try:
        return await open_environment(settings)
    except EnvironmentBroken as error:
        if "could not be fetched" not in error.message:
            raise
        pytest.skip(f"no package index in reach: {error.message}")


async def _made_again(lock: str, settings: Settings, town: Town, folder: Path) -> None:
    """An environment that is made of a session's lock has all of its packages, from both places."""
    assert "# of this session alone: kite, lamp, libpond, pond, shed\nname: town\n" in lock
    assert "  - pond=2.0=0\n" in lock
    assert lock.endswith("  - pip:\n      - kite==1.0\n      - lamp==1.0\n")
    (file := folder / "environment.yml").write_text(lock)
    settings = settings.model_copy(
        update={"environments": {"again": EnvironmentEntry(kind="conda", file=str(file))}, "environment": "again"}
    )
    assert examine(settings, "again").state == "not made"
    told: list[str] = []
    # One who was killed at it leaves this.
    root = managed_folder(settings, "again")
    ((left := root.with_name(f"{WORK}{root.name}")) / "conda-cache").mkdir(parents=True)

    made = await open_environment(settings, on_progress=told.append)

    assert any(line.startswith("fetching ") for line in told)
    run = [str(made.python), "-I", "-c", "import frogs, shed, lamp; print(frogs.depth)"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "7\n"
    listed = examine(settings, "again")
    assert (listed.state, listed.kind) == ("ready", "conda")
    assert listed.packages["libpond"] == "1.1"
    assert managed_folder(settings, "again") == made.prefix
    again = (made.prefix / "environment.lock.yml").read_text()
    assert again.partition("dependencies:")[2] == lock.partition("dependencies:")[2]
    assert not left.exists()
    (left := made.prefix.with_name(f"{WORK}managed-gone")).mkdir()
    assert unused_folders(settings) == [left]


@pytest.mark.anyio
async def test_an_environment_that_cannot_be_made_says_why_and_what_to_do(
    town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "environment.yml").write_text(
        f"channels: [{town.channel}]\ndependencies: [python, 'shed>=2', 'libgarden<4', castle]\n"
    )
    settings = settings_with(
        data_directory=tmp_path / "data", environments={"it": {"kind": "conda", "file": str(file)}}
    )

    with pytest.raises(EnvironmentBroken) as caught:
        await open_environment(settings, "it")
    assert f"no castle in {town.channel}" in caught.value.message
    assert "shed 2.0 would require" in caught.value.message

    monkeypatch.setattr("belljar.environments.uv.find_spec", lambda name: None)
    assert examine(settings, "it").hint.startswith("Run: pip install 'belljar-mcp[conda]'")
    file.write_text("dependencies: [numpy]")
    assert examine(settings, "it").problem == f"{file} has no python"


def test_the_command_makes_one_of_a_file_and_prints_its_table(
    town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(tmp_path))
    share_support(tmp_path)
    (file := tmp_path / "environment.yml").write_text("dependencies:\n  - python\n  - big-house\n")
    monkeypatch.setenv("CONDA_CHANNEL_ALIAS", town.mirror)
    monkeypatch.delenv("UV_DEFAULT_INDEX")

    status = env.create_from(settings_with(), ["big"], file)

    said = capsys.readouterr()
    if "could not be fetched" in said.err:
        pytest.skip(f"no package index in reach: {said.err}")
    assert (status, tomllib.loads(said.out)) == (
        0,
        {"environments": {"big": {"kind": "conda", "file": str(file)}}},
    ), said.err
    assert "big is ready: Python " in said.err


def test_channels_are_those_of_the_setting_or_of_the_environments_packages(
    town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (meta := tmp_path / "env" / "conda-meta").mkdir(parents=True)
    (tmp_path / "linux-64").mkdir()
    alias = "https://conda.anaconda.org"
    # A single package out of a folder, one at the root of a disk, and what is no URL do not make a channel.
    single = (tmp_path.as_uri(), "file://", "/srv", "s3://bucket")
    for number, place in enumerate((*[f"{alias}/conda-forge"] * 2, f"{alias}/t/secret/mine", *single)):
        url = f"{place}/linux-64/a-1-{number}.conda"
        (meta / f"a{number}-1-0.json").write_text(json.dumps({"name": "a", "url": url}, indent=2))

    forge, mine = "https://conda.anaconda.org/conda-forge", "https://conda.anaconda.org/mine"
    assert channels_of([], tmp_path / "env") == (forge, mine)
    assert channels_of(["bioconda"], tmp_path / "env") == ("https://conda.anaconda.org/bioconda",)
    assert channels_of([], tmp_path / "nothing") == (forge,)
    assert channels_of([], town.prefix)[0].startswith("file:///")
    monkeypatch.setenv("CONDA_CHANNEL_ALIAS", "http://me:secret@mirror.test:8080/conda/")
    assert channels_of([], tmp_path / "env") == (
        "http://mirror.test:8080/conda/conda-forge",
        "http://mirror.test:8080/conda/mine",
    )
    assert channel_urls(["https://other.test/x/", "defaults"]) == (
        *("https://other.test/x", "https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r"),
    )
    assert [str(rule) for rule in channel_rules(channel_urls(["a", "/srv/channel"]))] == ["mirror.test:8080"]


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("Pandas>=2,<3", ["pandas <3,>=2"]),
        ("numpy==1.26.*", ["numpy 1.26.*"]),
        ("ruamel.yaml", ["ruamel.yaml", "ruamel-yaml", "ruamel_yaml"]),
        ("torch~=2.5", ["torch ~=2.5", "pytorch ~=2.5"]),
        ("a===1.0", ["a ==1.0"]),
    ],
)
def test_requirements_are_spelled_as_conda_does(text: str, specs: list[str]) -> None:
    assert specs_of(Requirement(text)) == specs


@pytest.mark.parametrize("version", ["1.0[channel=evil]", "1.0[url=file:///etc/x.conda]", "/etc/passwd", "1|2"])
def test_a_version_cannot_name_a_channel_or_a_url(version: str) -> None:
    with pytest.raises(InvalidArgument, match="not a package to install"):
        check_requirements([f"kite==={version}"])


@pytest.mark.parametrize("entry", ["", "-x", "https://u:p@host/x", "https://host/t/abc/x", "a b"])
def test_a_channel_that_is_none_or_tells_a_secret_is_refused(entry: str) -> None:
    with pytest.raises(SettingsError, match="conda_channels"):
        settings_with(conda_channels=[entry])
