"""Programs in fresh processes of an environment, behind the glass that sessions have."""

import secrets
from collections.abc import AsyncIterator

import anyio
import pytest

from belljar.environments import Environment
from belljar.provisioning.program_process import ProgramEnd, program_arguments, run_program
from belljar.provisioning.starter import KernelStarter
from belljar.sessions.folders import SessionFolders
from cells import nesting
from shared_environment import shared_settings

pytestmark = pytest.mark.anyio


@pytest.fixture
async def starter(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KernelStarter]:
    starter = KernelStarter(shared_settings(), nesting(), tmp_path_factory.mktemp("unused"))
    yield starter
    await starter.aclose()


@pytest.fixture
def folders(starter: KernelStarter, tmp_path_factory: pytest.TempPathFactory) -> SessionFolders:
    root = tmp_path_factory.mktemp("program")
    root.chmod(0o711)
    made = SessionFolders(secrets.token_hex(16), root / "session", starter.provider.take_identity())
    made.make()
    return made


async def test_a_file_of_the_workspace_is_run_and_only_its_status_says_that_it_failed(
    starter: KernelStarter, default_environment: Environment, folders: SessionFolders
) -> None:
    (folders.workspace / "main.py").write_text("import sys, warnings\nwarnings.warn('old')\nprint(sys.argv[1:])\n")

    end = await run_program(starter, default_environment, folders, ["main.py", "a b"], timeout_s=60)

    assert (end.status, end.stdout, end.is_timeout, end.dropped_bytes) == (0, "['a b']\n", False, 0)
    assert "UserWarning: old" in end.stderr


async def test_a_text_that_was_settled_runs_whatever_is_in_its_file_by_then(
    starter: KernelStarter, default_environment: Environment, folders: SessionFolders
) -> None:
    place = folders.root.parent / "settled"
    place.mkdir()
    arguments = program_arguments("print('looked at', __file__, open(__file__).read())", "main.py", place)
    (folders.workspace / "main.py").write_text("print('swapped')")

    end = await run_program(starter, default_environment, folders, arguments, timeout_s=60, readable=[place])

    assert (end.status, end.stderr) == (0, "")
    assert end.stdout.startswith("looked at /")
    assert end.stdout.endswith("main.py print('swapped')\n")


async def test_it_is_sealed_off_and_its_status_is_told(
    starter: KernelStarter, default_environment: Environment, folders: SessionFolders
) -> None:
    code = "import os, sys; print(os.getcwd(), os.path.exists('/root/.ssh'), os.environ['HOME']); sys.exit(3)"

    end = await run_program(starter, default_environment, folders, ["-c", code], timeout_s=60)

    assert (end.status, end.stdout.split()[:2]) == (3, ["/mnt/data", "False"])


async def test_one_that_runs_too_long_is_ended_with_what_it_said(
    starter: KernelStarter, default_environment: Environment, folders: SessionFolders
) -> None:
    code = "import time; print('so far', flush=True); time.sleep(1000)"

    end = await run_program(starter, default_environment, folders, ["-c", code], timeout_s=2)

    assert (end.is_timeout, end.stdout) == (True, "so far\n")
    assert end.status < 0


async def test_a_child_that_it_leaves_behind_holds_nobody_up_and_output_has_a_cap(
    starter: KernelStarter, default_environment: Environment, folders: SessionFolders
) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '1000']); print('y' * 3_000_000)"

    with anyio.fail_after(60):
        end = await run_program(
            starter, default_environment, folders, ["-c", code], timeout_s=50, output_cap_bytes=1_000
        )

    assert end == ProgramEnd(0, "y" * 1_000, "", dropped_bytes=2_999_001)
