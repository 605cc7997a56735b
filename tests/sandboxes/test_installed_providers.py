"""Providers that installed packages bring: found by entry point, checked against the contract, never preferred."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from uv import find_uv_bin

from belljar.environments import Environment
from belljar.errors import SandboxUnavailable, SettingsError
from belljar.sandboxes import open_provider, providers
from belljar.sandboxes.process import ProcessProvider
from belljar.settings import Settings, load_settings
from belljar.settings import sandboxes as names
from live_server import clean_environment
from provider_packages import PROVIDER, PackageFolder, packages_on_path

POLITE = Path(__file__).parent / "polite_package"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageFolder:
    return packages_on_path(tmp_path / "packages", monkeypatch)


@pytest.fixture(scope="module")
def polite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a real package was installed into, without the network."""
    folder = tmp_path_factory.mktemp("polite")
    command = [find_uv_bin(), "pip", "install", "--offline", "--no-deps", "--no-config", "--quiet"]
    command += ["--cache-dir", str(folder / "cache"), "--python", sys.executable, "--target", str(folder / "packages")]
    subprocess.run([*command, str(POLITE)], check=True)
    return folder / "packages"


def _import_path(*folders: Path) -> str:
    """Return these folders and all that we import from, because an interpreter that `test_ordinary_user` chose has
    neither belljar nor pytest installed."""
    return os.pathsep.join([*map(str, folders), *filter(None, sys.path)])


def _belljar(
    polite: Path, folder: Path, environment: Environment, *arguments: str, **variables: object
) -> "subprocess.CompletedProcess[str]":
    chosen = {
        "PYTHONPATH": _import_path(polite),
        "XDG_CONFIG_HOME": folder / "config",
        "BELLJAR_DATA_DIRECTORY": folder / "data",
        "BELLJAR_ENVIRONMENT": environment.python,
        **variables,
    }
    command = [sys.executable, "-P", "-m", "belljar", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=clean_environment(**chosen))


def test_a_command_runs_in_the_sandbox_of_an_installed_package(
    polite: Path, tmp_path: Path, default_environment: Environment
) -> None:
    code = "import os\nprint(os.nice(0))\n1 + 1"
    ran = _belljar(polite, tmp_path, default_environment, "run", "--sandbox", "polite", "-c", code)
    assert (ran.stdout, ran.returncode) == (f"{min(os.nice(0) + 5, 19)}\n2\n", 0), ran.stderr


def test_doctor_checks_the_configured_provider_of_a_package_and_names_the_package(
    polite: Path, tmp_path: Path, default_environment: Environment
) -> None:
    told = _belljar(polite, tmp_path, default_environment, "doctor", "--json", BELLJAR_SANDBOX="polite")
    found = {line["name"]: line for line in json.loads(told.stdout) if line["section"] == "sandbox"}
    assert found["polite"]["detail"] == "brought by the package belljar-polite 1.0"
    assert found["polite, nice"] | {"detail": ""} == {
        "section": "sandbox",
        "status": "ok",
        "name": "polite, nice",
        "detail": "",
        "hint": "",
        "cost": "",
    }
    assert found["configured"]["detail"] == "polite. The polite sandbox does NOT isolate"


def test_the_contract_can_be_run_for_the_provider_of_a_package(polite: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/sandboxes/test_contract.py"]
    variables = clean_environment(PYTHONPATH=_import_path(polite), SANDBOX_UNDER_TEST="polite")
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables)
    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout


def test_the_guide_shows_the_package_that_is_tested() -> None:
    guide = (ROOT / "docs" / "guides" / "sandbox-providers.md").read_text()
    for file in ("pyproject.toml", "src/belljar_polite/__init__.py"):
        assert (POLITE / file).read_text() in guide


def test_packages_are_not_looked_through_for_a_provider_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> object:
        raise AssertionError("the metadata of all packages was read")

    monkeypatch.setattr(names, "entry_points", refuse)
    assert open_provider(Settings(sandbox="process")).name == "process"


def test_an_unknown_name_is_told_what_there_is(packages: PackageFolder) -> None:
    with pytest.raises(SettingsError) as refusal:
        load_settings({"sandbox": "vm"})
    assert refusal.value.message == (
        'sandbox = "vm" from --sandbox: belljar has namespace, container, gvisor, microvm, process; '
        "no installed package brings another"
    )
    packages.bring("acme")
    with pytest.raises(SettingsError, match=r"installed packages bring acme \(acme-sandbox 1\.2\)"):
        load_settings({"sandbox": "vm"})


def test_a_provider_of_a_package_joins_ours_only_when_it_is_chosen(packages: PackageFolder) -> None:
    packages.bring("acme")
    assert "acme" not in providers(Settings())
    assert providers(Settings(sandbox="acme")).keys() == {*providers(Settings()), "acme"}
    assert open_provider(Settings(sandbox="acme")).isolates


def test_a_package_cannot_replace_a_provider_of_ours(packages: PackageFolder) -> None:
    packages.bring("process", "raise AssertionError('it was imported')")
    assert isinstance(open_provider(Settings(sandbox="process")), ProcessProvider)


def test_two_packages_with_one_name_are_both_refused(packages: PackageFolder) -> None:
    packages.bring("acme")
    packages.bring("acme", package="other-sandbox")
    with pytest.raises(SettingsError, match=r"several packages bring it: acme-sandbox 1\.2, other-sandbox 1\.2"):
        load_settings({"sandbox": "acme"})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_of_that_name", "it does not load: ModuleNotFoundError"),
        ("def Provider(): raise OSError('no licence')", "it does not load: OSError: no licence"),
        ("Other = 1", "it does not load: AttributeError"),
        (PROVIDER.replace("contract = 1", ""), "it needs `contract = 1`"),
        (PROVIDER.replace("contract = 1", "contract = 0"), "written for version 0 of the contract, and this belljar"),
        (PROVIDER.replace("def check", "def examine"), "it has no method `check`"),
        (PROVIDER.replace("isolates = True", "isolates = 'yes'"), "it has no `isolates` that is a bool"),
        (PROVIDER.replace("{name!r}", "'process'"), "it calls itself 'process'"),
    ],
)
def test_a_provider_that_does_not_fulfil_the_contract_is_refused_with_its_package(
    packages: PackageFolder, code: str, reason: str
) -> None:
    packages.bring("acme", code.replace("{name!r}", "'acme'"))
    with pytest.raises(SandboxUnavailable) as refusal:
        open_provider(Settings(sandbox="acme"))
    assert "Sandbox acme of the package acme-sandbox 1.2 cannot be used: " in refusal.value.message
    assert reason in refusal.value.message


def test_a_check_that_raises_keeps_the_server_from_starting(packages: PackageFolder) -> None:
    packages.bring("brittle", PROVIDER.format(name="brittle").replace("return []", "raise OSError('no device')"))
    with pytest.raises(
        SandboxUnavailable, match="Sandbox brittle cannot run here: check: it raised OSError: no device"
    ):
        open_provider(Settings(sandbox="brittle"))


def test_a_package_in_the_working_directory_is_not_installed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    PackageFolder(work).bring("acme", "open('imported', 'w')")
    script = shutil.which("belljar", path=Path(sys.executable).parent)
    commands = [[sys.executable, "-m", "belljar"], *([[script]] if script else [])]
    # Without a script belljar is not installed for this interpreter, which then has to be told where it is.
    path = "" if script else _import_path()
    variables = clean_environment(XDG_CONFIG_HOME=tmp_path, BELLJAR_DATA_DIRECTORY=tmp_path / "data", PYTHONPATH=path)
    for command in commands:
        told = subprocess.run(
            [*command, "run", "--sandbox", "acme", "-c", "1"], capture_output=True, text=True, cwd=work, env=variables
        )
        assert "no installed package brings another" in told.stderr
        assert told.returncode
    assert not (work / "imported").exists()
