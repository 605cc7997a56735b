"""How a sandbox is closed for a server run by root, and what is done and said where something for it is missing."""

import os
import stat
import sys
from pathlib import Path

import pytest
from trials import ENVIRONMENT, PYTHON, Opener, read_until, run, usable

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Identity, Provider
from belljar.sandboxes.namespace import hardening
from belljar.sandboxes.namespace.provider import NamespaceProvider
from belljar.sandboxes.seccomp import Filter

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]
is_root = hasattr(os, "geteuid") and os.geteuid() == 0
for_root = pytest.mark.skipif(not is_root, reason="only root can give sessions users of their own")

HELD = ("CapInh", "CapPrm", "CapEff", "CapAmb")
WHO = "import os; print(os.getresuid(), os.getresgid(), os.getgroups())"


@pytest.fixture
def dropping() -> Provider:
    provider = usable("namespace")
    if (identity := provider.take_identity()) is None:
        pytest.skip(provider.warning)
    provider.release_identity(identity)
    return provider


def status(pid: int | str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@for_root
async def test_a_session_of_roots_is_a_user_of_its_own(dropping: Provider, open_sandbox: Opener) -> None:
    assert "root" not in dropping.warning
    sandbox, spec = await open_sandbox(dropping)
    code = (
        f"{WHO}; open('made', 'w').close(); print(*[l.split()[1] for l in open('/proc/self/status') if l[:3] == 'Cap'])"
    )
    outcome = await run(sandbox, code)
    made = (spec.workspace / "made").stat()
    uid, gid = made.st_uid, made.st_gid
    assert uid > 10_000
    assert outcome.output == f"({uid}, {uid}, {uid}) ({gid}, {gid}, {gid}) []\n{' '.join(['0' * 16] * 5)}\n"
    for folder in (spec.workspace, spec.scratch, spec.home):
        assert (folder.stat().st_uid, folder.stat().st_gid) == (uid, gid)
    assert spec.workspace.parent.stat().st_uid == 0


@for_root
async def test_no_process_of_a_sandbox_holds_a_capability_seen_from_outside(
    dropping: Provider, open_sandbox: Opener
) -> None:
    sandbox, spec = await open_sandbox(dropping)
    reading, writing = os.pipe()
    process = await sandbox.spawn(
        [PYTHON, "-c", "import signal; print('up', flush=True); signal.pause()"],
        environment=ENVIRONMENT,
        stdout=writing,
        stderr=writing,
    )
    os.close(writing)
    await read_until(reading, b"up")
    os.close(reading)
    first = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    command = int(Path(f"/proc/{first}/task/{first}/children").read_text())
    for pid in (process.pid, first, command):
        assert {name: int(status(pid)[name], 16) for name in HELD} == dict.fromkeys(HELD, 0)
        assert status(pid)["NoNewPrivs"] == "1"
    assert [status(pid)["Seccomp"] for pid in (first, command)] == ["2", "2"]
    assert int(status(command)["CapBnd"], 16) == 0
    assert status(command)["Uid"].split() == [str(spec.workspace.stat().st_uid)] * 4


@for_root
async def test_an_identity_of_the_spec_is_kept(dropping: Provider, open_sandbox: Opener) -> None:
    identity = dropping.take_identity()
    assert identity is not None
    sandbox, spec = await open_sandbox(dropping, identity=identity)
    assert (await run(sandbox, "import os; print(os.getuid())")).output == f"{identity.uid}\n"
    await sandbox.kill()
    assert (await run(sandbox, "import os; print(os.getuid())")).output == f"{identity.uid}\n"
    assert spec.home.stat().st_gid == identity.gid


@for_root
async def test_a_folder_that_the_session_closed_to_all_is_entered_again(
    dropping: Provider, open_sandbox: Opener
) -> None:
    sandbox, spec = await open_sandbox(dropping)
    await run(sandbox, "import os; os.mkdir('private', 0o700); os.chmod('.', 0o700)")
    assert stat.S_IMODE(spec.workspace.stat().st_mode) == 0o700
    assert (await run(sandbox, "import os; print(os.listdir())")).output == "['private']\n"


@for_root
async def test_a_tree_that_only_root_may_read_is_named(
    dropping: Provider, open_sandbox: Opener, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o700)
    with pytest.raises(SandboxUnavailable) as refusal:
        await open_sandbox(dropping, readable=[tree])
    assert str(tree) in refusal.value.message
    assert "chmod" in refusal.value.hint


@for_root
async def test_the_loader_hears_of_its_variables_only_after_the_drop(dropping: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(dropping)
    variables = {**ENVIRONMENT, "LD_PRELOAD": "/mnt/data/missing.so", "A": "b"}
    outcome = await run(sandbox, "import os; print(os.environ['LD_PRELOAD'], os.environ['A'])", environment=variables)
    assert outcome.status == 0
    assert outcome.output.endswith("/mnt/data/missing.so b\n")
    # The loader complains once for every program it starts: here for Python alone, and never for setpriv.
    assert outcome.output.count("cannot be preloaded") == 1


def test_what_the_loader_obeys_is_set_last() -> None:
    given = {"LD_LIBRARY_PATH": "/x", "GCONV_PATH": "/y", "PATH": "/usr/bin", "OLD_LD_": "z"}
    command, variables = hardening.drop_command("/usr/bin/setpriv", Identity(7, 8), given)
    assert variables == {"PATH": "/usr/bin", "OLD_LD_": "z"}
    assert command[command.index("--") :] == ["--", "/usr/bin/env", "LD_LIBRARY_PATH=/x", "GCONV_PATH=/y"]


async def test_without_libseccomp_it_runs_and_says_so(open_sandbox: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    usable("namespace")
    monkeypatch.setattr(hardening, "load_filter", lambda: Filter(complaint="libseccomp cannot be loaded (none)"))
    provider = NamespaceProvider()
    assert "libseccomp cannot be loaded" in provider.warning
    (line,) = [check for check in provider.check() if check.name == "system calls"]
    assert "libseccomp2" in line.hint
    assert all(check.is_ok for check in provider.check())
    assert provider.take_identity() is None
    assert ("uid 0" in provider.warning) == is_root
    sandbox, _ = await open_sandbox(provider)
    code = f"{WHO}\nimport os\ntry: os.chroot('.')\nexcept OSError: print('held')"
    assert (await run(sandbox, code)).output.splitlines()[0].startswith("(1000, 1000, 1000) (1000, 1000, 1000)")
    assert "unshare" in (await run(sandbox, "", command=["unshare", "--user", "true"])).output


@for_root
@pytest.mark.parametrize(
    ("name", "answer", "why"),
    [("_find_setpriv", "", "setpriv is not installed"), ("find_host_users", None, "too few users are mapped")],
)
async def test_without_what_the_drop_needs_root_uses_a_user_namespace_and_says_so(
    open_sandbox: Opener, monkeypatch: pytest.MonkeyPatch, name: str, answer: object, why: str
) -> None:
    usable("namespace")
    monkeypatch.setattr(hardening, name, lambda: answer)
    provider = NamespaceProvider()
    assert why in provider.warning
    (line,) = [check for check in provider.check() if check.name == "users"]
    assert why in line.detail
    sandbox, spec = await open_sandbox(provider)
    assert (await run(sandbox, WHO)).output.startswith("(1000, 1000, 1000)")
    assert spec.workspace.stat().st_uid == 0


@for_root
async def test_where_root_may_not_mount_a_user_namespace_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    usable("namespace")
    monkeypatch.setattr(hardening, "_find_setpriv", lambda: "/usr/bin/no-such-setpriv")
    provider = NamespaceProvider()
    assert all(check.is_ok for check in provider.check())
    assert "no-such-setpriv" in provider.warning
    assert provider.take_identity() is None
