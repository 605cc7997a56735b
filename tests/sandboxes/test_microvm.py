"""Virtual machines: what keeps them from booting is told at once, and nothing is believed that has not run.

Few hosts that run these tests boot machines. So what is ours is run against a stand-in of the package that starts
ordinary processes. Where machines boot, test_contract.py runs in real ones; docs/concepts/hosts.md says where it did.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from trials import DEADLINE_S, PYTHON, Outcome, run

from belljar.errors import SandboxUnavailable
from belljar.inside import guest_init
from belljar.sandboxes import microvm, open_provider
from belljar.sandboxes.base import Interruptible, Limits, SandboxSpec
from belljar.sandboxes.microvm import MicroVMProvider, find_obstacle, interpreter_for, make_root
from belljar.settings import Settings

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="refused elsewhere, which test_providers.py tests"),
]


class MicrosandboxError(Exception):
    pass


class Factory:
    """Remembers what it was asked for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *words, **options: (name, words, options)


class Command:
    """What the stand-in runs instead of a machine's command."""

    def __init__(self, order: str, routes: dict[int, str]) -> None:
        told = json.loads(order)
        addresses = told["descriptors"].items()
        told["descriptors"] = {number: f"unix:{routes[int(address[6:])]}" for number, address in addresses}
        told["folder"] = "/"
        self.process = subprocess.Popen([sys.executable, "-IS", guest_init.__file__, json.dumps(told)])

    async def wait(self) -> tuple[int, bool]:
        status = await asyncio.to_thread(self.process.wait)
        return (-1 if status < 0 else status), status == 0  # as microsandbox 0.7.11 says it of every signal

    async def signal(self, number: int) -> None:
        self.process.send_signal(number)


class Machine:
    """A stand-in for `microsandbox.Sandbox`."""

    made: "list[Machine]" = []
    removed: list[str] = []
    complaint = ""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.options = options
        self.commands: list[Command] = []

    @classmethod
    async def create(cls, name: str, **options: Any) -> "Machine":
        if cls.complaint:
            raise MicrosandboxError(cls.complaint)
        cls.made.append(cls(name, options))
        return cls.made[-1]

    @classmethod
    async def remove(cls, name: str) -> None:
        cls.removed.append(name)
        if name not in [machine.name for machine in cls.made]:
            raise MicrosandboxError(f"there is no {name}")

    async def exec_stream(self, _interpreter: str, arguments: Sequence[str]) -> Command:
        routes = {words[1]: words[0] for _, words, _ in self.options["vsock"]}
        self.commands.append(Command(arguments[-1], routes))
        return self.commands[-1]

    async def kill(self, timeout: float) -> None:
        assert timeout > 0
        for command in self.commands:
            command.process.kill()
            command.process.wait()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[Machine]:
    package: Any = ModuleType("microsandbox")
    package.Sandbox, package.MicrosandboxError = Machine, MicrosandboxError
    package.Image = package.Network = package.Volume = package.VsockRoute = Factory()
    package.SecurityProfile = SimpleNamespace(RESTRICTED="restricted")
    monkeypatch.setitem(sys.modules, "microsandbox", package)
    monkeypatch.setattr(Machine, "made", [])
    monkeypatch.setattr(Machine, "removed", [])
    monkeypatch.setattr(microvm, "find_obstacle", lambda: None)
    return Machine


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    for name in ("workspace", "scratch", "home"):
        (tmp_path / name).mkdir()
    folders = [tmp_path / name for name in ("workspace", "scratch", "home")]
    return SandboxSpec("session", *folders, limits=Limits(memory_mb=512, cpus=1.5, temporary_mb=32))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def _host(folder: Path, flags: str, *, has_device: bool = True) -> dict[str, Path]:
    (folder / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    if has_device:
        (folder / "kvm").touch(0o600)
    return {"proc": folder, "device": folder / "kvm"}


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SandboxUnavailable, match="not installed") as refusal:
        open_provider(Settings(sandbox="microvm"))
    assert refusal.value.hint == "pip install 'belljar-mcp[microvm]'"


@pytest.mark.usefixtures("installed")
def test_a_processor_without_virtualization_is_told_and_a_paravirtual_device_does_not_hide_it(tmp_path: Path) -> None:
    obstacle = find_obstacle(**_host(tmp_path, "fpu sse2", has_device=False))
    assert obstacle is not None
    assert "no vmx (Intel) or svm (AMD)" in obstacle.detail
    assert "paravirtual" not in obstacle.detail
    obstacle = find_obstacle(**_host(tmp_path, "fpu sse2"))
    assert obstacle is not None
    assert "paravirtual" in obstacle.detail
    assert "nested virtualization" in obstacle.hint


@pytest.mark.usefixtures("installed")
def test_a_missing_device_names_the_modules(tmp_path: Path) -> None:
    obstacle = find_obstacle(**_host(tmp_path, "fpu vmx", has_device=False))
    assert obstacle is not None
    assert obstacle.detail.endswith("kvm is missing")
    assert "kvm_intel" in obstacle.hint


@pytest.mark.usefixtures("installed")
def test_a_device_that_is_closed_names_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    obstacle = find_obstacle(**_host(tmp_path, "fpu svm"))
    assert obstacle is not None
    assert "group kvm" in obstacle.hint


@pytest.mark.usefixtures("installed")
def test_a_host_with_all_of_it_has_no_obstacle(tmp_path: Path) -> None:
    assert find_obstacle(**_host(tmp_path, "fpu svm")) is None


async def test_a_command_tells_its_status_and_its_streams(stand_in: type[Machine], spec: SandboxSpec) -> None:
    sandbox = await MicroVMProvider().open(spec)
    outcome = await run(sandbox, "import os, sys; print(sorted(os.environ)); sys.exit(5)", environment={"LC_ALL": "C"})
    assert outcome == Outcome(5, "['LC_ALL']\n")
    assert await run(sandbox, "import os; os.kill(os.getpid(), 11)") == Outcome(-signal.SIGSEGV, "")
    await sandbox.aclose()
    await sandbox.aclose()
    with pytest.raises(SandboxUnavailable, match="closed"):
        await run(sandbox, "pass")
    options = stand_in.made[0].options
    assert (options["memory"], options["cpus"], options["network"][0]) == (512, 2, "none")
    assert options["volumes"]["/usr"] == ("bind", ("/usr",), {"readonly": True, "nosuid": True, "nodev": True})
    assert options["volumes"]["/mnt/data"][1] == (str(spec.workspace),)
    assert options["volumes"]["/tmp"] == ("tmpfs", (), {"size_mib": 32, "nosuid": True, "nodev": True})
    assert options["security"] == "restricted"


@pytest.mark.usefixtures("stand_in")
async def test_the_signal_that_ends_a_command_is_told_although_the_package_says_minus_one(spec: SandboxSpec) -> None:
    sandbox = await MicroVMProvider().open(spec)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT):
        assert await run(sandbox, f"import os; os.kill(os.getpid(), {number:d})") == Outcome(-number, "")
    await sandbox.aclose()


@pytest.mark.usefixtures("stand_in")
async def test_a_command_that_is_not_there_says_so_and_ends_with_127(spec: SandboxSpec) -> None:
    sandbox = await MicroVMProvider().open(spec)
    reading, writing = os.pipe()
    process = await sandbox.spawn(["/no/such"], environment={}, stdout=writing, stderr=writing)
    os.close(writing)
    with os.fdopen(reading) as heard:
        assert "/no/such did not start" in await asyncio.to_thread(heard.read)
    assert await process.wait() == 127
    await sandbox.aclose()


@pytest.mark.usefixtures("stand_in")
async def test_kill_ends_the_machine_and_another_may_follow(spec: SandboxSpec) -> None:
    sandbox = await MicroVMProvider().open(spec)
    reading, writing = os.pipe()
    code = "import signal; print('up', flush=True); signal.pause()"
    process = await sandbox.spawn([PYTHON, "-c", code], environment={}, stdout=writing, stderr=writing)
    os.close(writing)
    assert await asyncio.to_thread(os.read, reading, 9) == b"up\n"
    await sandbox.kill()
    assert await process.wait() == -signal.SIGKILL
    assert await asyncio.to_thread(os.read, reading, 9) == b""
    os.close(reading)
    assert (await run(sandbox, "print('again')")).output == "again\n"
    await sandbox.aclose()
    assert Machine.removed == [machine.name for machine in Machine.made], "a killed one leaves its record and its logs"


@pytest.mark.usefixtures("stand_in")
async def test_an_interrupt_goes_through_the_machines_agent(spec: SandboxSpec) -> None:
    sandbox = await MicroVMProvider().open(spec)
    reading, writing = os.pipe()
    code = "import signal\ntry: print('up', flush=True); signal.pause()\nexcept KeyboardInterrupt: raise SystemExit(4)"
    process = await sandbox.spawn([PYTHON, "-c", code], environment={}, stdout=writing, stderr=writing)
    os.close(writing)
    await asyncio.to_thread(os.read, reading, 9)
    assert isinstance(process, Interruptible)
    process.interrupt()
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 4
    os.close(reading)
    await sandbox.aclose()


@pytest.mark.usefixtures("stand_in")
def test_the_trial_believes_what_ran() -> None:
    provider = MicroVMProvider()
    assert all(check.is_ok for check in provider.check())
    assert len(Machine.made) == 1
    provider.check()
    assert len(Machine.made) == 1


@pytest.mark.usefixtures("stand_in")
def test_a_machine_that_does_not_boot_is_refused_in_the_packages_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "complaint", "exited before the agent was there")
    with pytest.raises(SandboxUnavailable, match="exited before the agent was there"):
        open_provider(Settings(sandbox="microvm"))
    assert len(Machine.removed) == 1, "one that did not boot leaves its record and its logs"


@pytest.mark.usefixtures("stand_in")
def test_the_trial_has_as_long_as_a_kernel_has_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(_self: Command) -> tuple[int, bool]:
        await asyncio.Event().wait()
        return 3, False

    monkeypatch.setattr(Command, "wait", wait)
    with pytest.raises(SandboxUnavailable, match=r"did not end within 0.2 s \(`start_timeout_s`\)"):
        open_provider(Settings(sandbox="microvm", start_timeout_s=0.2))


@pytest.mark.usefixtures("stand_in")
def test_a_machine_that_tells_another_status_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(_self: Command) -> tuple[int, bool]:
        return 0, True

    monkeypatch.setattr(Command, "wait", wait)
    with pytest.raises(SandboxUnavailable, match="should have ended with 3"):
        open_provider(Settings(sandbox="microvm"))


def test_the_root_has_a_place_for_everything_shown(tmp_path: Path) -> None:
    make_root(tmp_path / "root", [Path("/opt/science")])
    root = tmp_path / "root"
    assert all((root / name).is_dir() for name in ("usr", "mnt/data", "run/belljar", "opt/science", "proc", "tmp"))
    assert (root / "bin").is_symlink() == Path("/bin").is_symlink()
    assert (root / "run/guest_init.py").read_bytes() == Path(guest_init.__file__).read_bytes()
    assert "hunter2" not in (root / "etc/passwd").read_text()


def test_guest_init_runs_on_the_commands_python_or_the_systems() -> None:
    assert interpreter_for(["/opt/science/bin/python3.12", "-c", ""]) == "/opt/science/bin/python3.12"
    assert interpreter_for(["true"]).endswith("python3")


def test_the_server_of_earlier_versions_is_answered_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSB_SERVER_URL", "http://127.0.0.1:5555")
    server = next(check for check in MicroVMProvider().check() if check.name == "server")
    assert server.is_ok, "it keeps nothing from working"
    assert "is set and not used" in server.detail
    assert "belljar serve --http" in server.hint
