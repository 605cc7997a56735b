"""The `executor` surface through a client: code files, fresh processes, packages, environments."""

import fcntl
import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from calls import ERAS, opened_runtime, served_over_http
from mcp import Client
from pydantic import SecretStr
from wires import HELLO, tool_call

from belljar.environments import Environment
from belljar.errors import BelljarError, SettingsError
from belljar.mcp.executor import Choice, from_variables
from belljar.mcp.server import build_server
from belljar.runtime import Runtime
from belljar.settings import load_settings
from live_server import live_server
from waiting import until

pytestmark = pytest.mark.anyio

VARIABLES = ("CODE_STORAGE_DIR", "ENV_TYPE", "CONDA_ENV_NAME", "VENV_PATH", "UV_VENV_PATH")
NAMES = {
    *("execute_code", "initialize_code_file", "append_to_code_file", "execute_code_file", "read_code_file"),
    *("install_dependencies", "check_installed_packages", "configure_environment", "get_environment_config"),
}


class Executor:
    """A client of the surface, with answers as it has to parse them: from the text."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        answer = await self.client.call_tool(tool, arguments)
        fields = json.loads(answer.content[0].text)  # pyright: ignore[reportAttributeAccessIssue]
        assert answer.structured_content == fields
        assert answer.is_error == (fields["status"] == "error")
        return fields

    async def run(self, code: str, **more: Any) -> dict[str, Any]:
        return await self.call("execute_code", code=code, **more)


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    folder = tmp_path_factory.mktemp("belljar")
    limits = {"execution_timeout_s": 20, "output_budget_chars": 2_000, "max_code_bytes": 100_000}
    async with opened_runtime(default_environment, folder, surfaces=["executor"], **limits) as runtime:
        yield runtime


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("CODE_STORAGE_DIR", str(tmp_path / "code"))
    return tmp_path / "code"


@asynccontextmanager
async def opened(runtime: Runtime, era: str = ERAS[-1]) -> AsyncGenerator[Executor]:
    async with Client(build_server(runtime, ["executor"]), mode=era) as client:
        yield Executor(client)


@pytest.fixture
async def executor(runtime: Runtime, storage: Path) -> AsyncGenerator[Executor]:
    async with opened(runtime) as executor:
        yield executor


@pytest.mark.parametrize("era", ERAS)
async def test_the_nine_tools_are_there_in_both_eras(runtime: Runtime, storage: Path, era: str) -> None:
    async with opened(runtime, era) as executor:
        assert {tool.name for tool in (await executor.client.list_tools()).tools} == NAMES
        assert (await executor.run("print(6 * 7)"))["output"] == "42\n"


async def test_code_is_kept_in_a_file_and_run_as_a_program(executor: Executor, storage: Path) -> None:
    code = "import sys\nprint(__name__, sys.argv)"
    told = await executor.run(code, filename="matrix.py")
    name = told["generated_filename"]
    assert name.startswith("matrix_")
    assert len(name) == len("matrix_12345678.py")
    assert told == {
        "status": "success",
        "output": f"__main__ ['{name}']\n",
        "file_path": str(storage / name),
        "generated_filename": name,
    }
    assert (storage / name).read_text() == code


async def test_hints_are_true_and_what_reads_makes_nothing(runtime: Runtime, storage: Path) -> None:
    def there() -> list[tuple[str, int]]:
        folders = (storage.parent, runtime.settings.data_directory / "executor")
        return sorted((str(path), path.lstat().st_mtime_ns) for folder in folders for path in folder.rglob("*"))

    async with opened(runtime) as executor:
        hints = {tool.name: tool.annotations for tool in (await executor.client.list_tools()).tools}
        assert {name for name, each in hints.items() if each and each.read_only_hint} == {
            *("read_code_file", "check_installed_packages", "get_environment_config")
        }
        assert {name for name, each in hints.items() if each and each.destructive_hint} == {
            *("execute_code", "execute_code_file", "install_dependencies")
        }
        assert {name for name, each in hints.items() if each and each.idempotent_hint} == {"configure_environment"}
        for is_used in (False, True):
            path = (await executor.run("print(1)"))["file_path"] if is_used else "code_00000000.py"
            before = there()
            told = await executor.call("read_code_file", file_path=path)
            assert told["status"] == ("success" if is_used else "error")
            assert (await executor.call("check_installed_packages", packages=["pandas"]))["all_installed"]
            assert (await executor.call("get_environment_config"))["config"]["code_storage_dir"] == str(storage)
            assert there() == before


async def test_arguments_that_are_wrong_are_refused_in_the_form_of_every_answer(executor: Executor) -> None:
    unknown = (await executor.run("1", sesion_id="x"))["error"]
    assert unknown.startswith("invalid-argument: execute_code has no argument 'sesion_id'. It takes code, filename")
    wrong: list[dict[str, Any]] = [{"packages": 5}, {}, {"packages": []}]
    for arguments in wrong:
        told = await executor.call("check_installed_packages", **arguments)
        assert (told["status"], "packages" in told["error"]) == ("error", True)


async def test_a_program_cannot_print_a_notice_of_belljars(executor: Executor) -> None:
    told = await executor.run("import sys\nprint('[belljar: x]')\nprint('[belljar: y]', file=sys.stderr)")
    assert (told["output"], told["stderr"]) == ("[printed: belljar: x]\n", "[printed: belljar: y]\n")


async def test_warnings_are_no_error_and_lose_no_output(executor: Executor) -> None:
    told = await executor.run("import warnings\nwarnings.warn('mind the gap')\nprint('done')")
    assert (told["status"], told["output"]) == ("success", "done\n")
    assert "mind the gap" in told["stderr"]


async def test_an_error_keeps_what_was_printed_before_it(executor: Executor) -> None:
    told = await executor.run("print('before')\n1 / 0")
    assert (told["status"], told["output"]) == ("error", "before\n")
    assert "ZeroDivisionError" in told["error"]


async def test_every_run_is_a_fresh_process_and_files_stay(executor: Executor) -> None:
    await executor.run("x = 1\nopen('kept.txt', 'w').write('here')")
    told = await executor.run("print('x' in globals(), open('kept.txt').read())")
    assert told["output"] == "False here\n"


async def test_files_of_an_earlier_server_can_be_changed(runtime: Runtime, storage: Path) -> None:
    for line in ("one", "two"):
        async with opened(runtime) as executor:
            told = await executor.run(f"open('log.txt', 'a').write({line!r})\nprint(open('log.txt').read())")
    assert told["output"] == "onetwo\n"


async def test_a_long_program_is_written_in_parts(executor: Executor) -> None:
    begun = await executor.call("initialize_code_file", content="x = 20\n", filename="long")
    path = begun["file_path"]
    assert path.endswith(begun["filename"])
    await executor.call("append_to_code_file", file_path=path, content="print(x + 1)\n")
    assert (await executor.call("execute_code_file", file_path=path))["output"] == "21\n"
    told = await executor.call("read_code_file", file_path=path)
    assert told == {"status": "success", "content": "x = 20\nprint(x + 1)\n", "file_path": path}


async def test_a_path_from_a_traceback_means_the_same_file(executor: Executor) -> None:
    told = await executor.run("raise ValueError(__file__)")
    inside = told["error"].split('File "')[1].split('"')[0]
    assert (await executor.call("read_code_file", file_path=inside))["file_path"] == told["file_path"]


async def test_a_program_runs_as_python_would_run_its_file(executor: Executor, storage: Path) -> None:
    await executor.run("open('beside.py', 'w').write('here = 1')")
    told = await executor.run(
        "import beside, pickle, sys\nclass A: pass\nprint(__name__, sys.argv == [__file__.split('/')[-1]], sorted(\n"
        "    n for n in globals() if n[0] != '_'), pickle.loads(pickle.dumps(A())).__class__ is A)\nsys.exit(4)"
    )
    assert told["output"] == "__main__ True ['A', 'beside', 'pickle', 'sys'] True\n"
    assert "exit status 4" in told["error"]
    broken = (await executor.run("x = (\n"))["error"]
    assert "SyntaxError" in broken
    raised = (await executor.run("def f():\n    1 / 0\nf()"))["error"]
    assert raised.count("File ") == 2
    assert "program.py" not in broken + raised


@pytest.mark.parametrize("path", ["/etc/passwd", "../journal.sqlite", "/mnt/data/../etc/passwd", "nothing.py", ""])
@pytest.mark.parametrize("tool", ["read_code_file", "execute_code_file", "append_to_code_file"])
async def test_nothing_outside_the_folder_is_read_run_or_changed(executor: Executor, tool: str, path: str) -> None:
    more = {"content": "x"} if tool.startswith("append") else {}
    assert (await executor.call(tool, file_path=path, **more))["status"] == "error"


async def test_a_link_that_code_made_is_not_followed(executor: Executor, storage: Path) -> None:
    secret = storage.parent / "secret"
    secret.write_text("host")
    await executor.run(f"import os\nos.symlink({str(secret)!r}, 'link.py')")
    assert "host" not in json.dumps(await executor.call("read_code_file", file_path="link.py"))
    await executor.call("append_to_code_file", file_path="link.py", content="x")
    assert secret.read_text() == "host"


@pytest.mark.parametrize("name", ["a;b", "../a", "a/b", "$(touch x)", "-c", "a" * 200, "."])
async def test_a_filename_that_is_no_plain_name_is_refused(executor: Executor, name: str) -> None:
    assert "plain name" in (await executor.run("1", filename=name))["error"]


async def test_long_output_is_cut_and_kept_whole_in_a_file(executor: Executor) -> None:
    told = await executor.run("print('a' + 'x' * 3_000_000 + 'z')")
    assert told["status"] == "success"
    assert len(told["output"]) < 3_000
    assert told["output"].startswith("a")
    assert told["output"].endswith("z\n")
    assert Path(told["full_output"]).stat().st_size == 3_000_003


async def test_a_data_uri_is_not_cut_in_the_middle_but_is_in_the_file(executor: Executor) -> None:
    told = await executor.run("print('begin data:image/png;base64,' + 'QUJD' * 5_000 + ' end')")
    assert told["output"] == "begin \n[belljar: a data: URI of 20,022 characters is left out here]\n end\n"
    assert "QUJD" * 5_000 in Path(told["full_output"]).read_text()


async def test_output_that_cannot_be_kept_whole_is_no_error(executor: Executor) -> None:
    begun = await executor.call("initialize_code_file", content="print('x' * 10_000)")
    folder = begun["filename"].removesuffix(".py") + ".output.txt"
    await executor.run(f"import os\nos.mkdir({folder!r})")
    told = await executor.call("execute_code_file", file_path=begun["file_path"])
    assert (told["status"], told["output"][:4]) == ("success", "xxxx")
    assert "not kept" in told["full_output"]


async def test_a_folder_behind_a_link_is_the_folder(
    runtime: Runtime, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (storage.parent / "real").mkdir()
    (storage.parent / "link").symlink_to(storage.parent / "real")
    monkeypatch.setenv("CODE_STORAGE_DIR", str(storage.parent / "link"))
    async with opened(runtime) as executor:
        assert (await executor.run("print(open(__file__).read())"))["status"] == "success"
    assert len([*(storage.parent / "real").glob("*.py")]) == 1


async def test_code_that_does_not_end_is_ended(default_environment: Environment, storage: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    quick = {"surfaces": ["executor"], "execution_timeout_s": 1}
    async with opened_runtime(default_environment, tmp_path / "data", **quick) as runtime, opened(runtime) as executor:
        told = await executor.run("print('begun', flush=True)\nwhile True: pass")
    assert (told["status"], told["output"]) == ("error", "begun\n")
    assert "timeout" in told["error"]


async def test_code_is_sealed_off_like_a_session(executor: Executor) -> None:
    told = await executor.run("import socket\nsocket.create_connection(('127.0.0.1', 22), 1)")
    assert told["status"] == "error"
    assert "No such file" in (await executor.run("open('/etc/shadow')"))["error"]


async def test_packages_are_found_by_either_name_and_by_version(executor: Executor) -> None:
    asked = ["scikit-learn", "sklearn", "pandas>=1", "pandas<1", "no-such-thing"]
    told = await executor.call("check_installed_packages", packages=asked)
    assert (told["all_installed"], told["not_installed"]) == (False, ["pandas<1", "no-such-thing"])
    details = told["package_details"]
    assert [details[name]["installed"] for name in asked] == [True, True, True, False, False]
    assert set(details["sklearn"]) == {"installed", "version", "location"}


async def test_a_package_is_no_place_for_a_command(executor: Executor, storage: Path) -> None:
    for package in ("; touch evil", "--target=/", "../wheel.whl", "git+https://example.org/x"):
        told = await executor.call("install_dependencies", packages=[package])
        assert "not a package to install" in told["error"]


async def test_code_too_long_is_refused_with_the_way_out(executor: Executor) -> None:
    assert "append_to_code_file" in (await executor.run("#" * 100_001))["error"]


# Cancelling


@asynccontextmanager
async def greeted(url: str, key: str) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of 2025's protocol, over the bare wire."""
    accepted = {"accept": "application/json, text/event-stream", "authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=60, headers=accepted, base_url=url) as client:
        answer = await client.post("/mcp", json=HELLO)
        client.headers["mcp-session-id"] = answer.headers["mcp-session-id"]
        client.headers["mcp-protocol-version"] = "2025-11-25"
        await client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        yield client


async def until_there(path: Path) -> None:
    await until(path.exists)


# It holds a lock as long as it lives, and says when it has begun and when it was told to go on.
LOCKED = (
    "import fcntl, os, time\nlock = open('lock', 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)\nopen('begun', 'w').close()\n"
    "while True:\n    time.sleep(0.005)\n    if os.path.exists('go'): open('went', 'w').close()\n"
)


async def test_a_cancelled_call_ends_its_program_and_another_principal_cannot_cancel_it(
    default_environment: Environment, storage: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    ada, bob = "a" * 40, "b" * 40
    chosen = {"surfaces": ["executor"], "api_keys": [SecretStr(f"ada:{ada}"), SecretStr(f"bob:{bob}")]}
    cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    async with (
        opened_runtime(default_environment, tmp_path / "data", **chosen) as runtime,
        served_over_http(runtime) as url,
        greeted(url, ada) as adas,
        greeted(url, bob) as bobs,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(adas.post, "/mcp", json=tool_call(7, "execute_code", code=LOCKED)))
        folder = storage / hashlib.sha256(b"key:ada").hexdigest()[:16]
        await until_there(folder / "begun")
        assert (await bobs.post("/mcp", json=cancelled)).status_code == 202
        theirs = {"mcp-session-id": adas.headers["mcp-session-id"]}
        assert (await bobs.post("/mcp", json=cancelled, headers=theirs)).status_code == 404
        (folder / "go").touch()
        await until_there(folder / "went")
        assert (await adas.post("/mcp", json=cancelled)).status_code == 202
        with (folder / "lock").open() as lock:
            await until(lambda: is_free(lock.fileno()))


def is_free(lock: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


# Environments


async def test_a_caller_chooses_among_what_the_operator_has(
    runtime: Runtime, storage: Path, default_environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(default_environment.python.parent.parent)
    monkeypatch.setenv("VENV_PATH", folder)
    async with opened(runtime) as executor:
        told = await executor.call("get_environment_config")
        assert told["config"]["type"] == "venv"
        assert told["config"]["venv_path"] == folder
        refused = await executor.call("configure_environment", type="venv", venv_path="/nowhere")
        assert "operator" in refused["error"]
        chosen = await executor.call("configure_environment", type="venv", venv_path=f"{folder}/")
        assert chosen["previous"] == chosen["current"] == {"type": "venv", "venv_path": folder}
        same = await executor.call("configure_environment", type="venv-uv", uv_venv_path=folder)
        assert same["current"] == {"type": "venv-uv", "uv_venv_path": folder}
        missing = await executor.call("configure_environment", type="venv-uv")
        assert "needs uv_venv_path" in missing["error"]


async def test_a_choice_lasts_for_its_connection(default_environment: Environment, storage: Path) -> None:
    place = str(default_environment.python.parent.parent)
    more = {"BELLJAR_SURFACES": "executor", "CODE_STORAGE_DIR": storage, "UV_VENV_PATH": place, "ENV_TYPE": "venv-uv"}
    data = storage.parent / "data"
    with live_server(data, Path("default"), VENV_PATH=place, **more) as url:
        async with Client(url, mode="legacy") as one, Client(url, mode="legacy") as other:
            first, second = Executor(one), Executor(other)
            told = await first.call("configure_environment", type="venv", venv_path=place)
            assert (told["previous"]["type"], told["current"]["type"]) == ("venv-uv", "venv")
            assert (await first.call("get_environment_config"))["config"]["type"] == "venv"
            assert (await second.call("get_environment_config"))["config"]["type"] == "venv-uv"
            assert (await second.run("print(1)"))["output"] == "1\n"
    assert not (data / "environments").exists(), "the default environment is not prepared, because nothing runs in it"


async def test_an_environment_that_is_not_there_is_noticed_at_the_start(
    runtime: Runtime, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONDA_ENV_NAME", "no-such-environment")
    with pytest.raises(BelljarError, match="no conda environment is called no-such-environment"):
        build_server(runtime, ["executor"])


def test_a_configuration_that_names_only_a_conda_environment_works() -> None:
    assert from_variables({"CONDA_ENV_NAME": "science"}) == Choice("conda", "science")
    assert from_variables({}) == Choice()
    assert from_variables({"ENV_TYPE": "venv", "VENV_PATH": "/v", "CONDA_ENV_NAME": "old"}) == Choice("venv", "/v")


def test_variables_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(SettingsError, match="ENV_TYPE = 'docker'"):
        from_variables({"ENV_TYPE": "docker"})
    with pytest.raises(SettingsError, match="UV_VENV_PATH is not set"):
        from_variables({"ENV_TYPE": "venv-uv", "VENV_PATH": "/v"})


def test_two_meanings_of_one_name_are_never_served_together() -> None:
    with pytest.raises(SettingsError, match="another shape"):
        load_settings({"surfaces": ["interpreter", "executor"]})


async def test_the_policy_holds_for_programs_too(
    default_environment: Environment, storage: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        '[[code]]\nimports = ["socket"]\nreason = "no network"\n[[output]]\ntext = "hidden"\nreplace = "…"\n'
    )
    (tmp_path / "data").mkdir(mode=0o755)
    more = {"surfaces": ["executor"], "policy": str(policy)}
    async with opened_runtime(default_environment, tmp_path / "data", **more) as runtime, opened(runtime) as executor:
        refused = await executor.run("import socket\nprint('ran')")
        assert "code-rejected" in refused["error"]
        assert "line 1" in refused["error"]
        assert "hidden" not in (await executor.run("print('is hid' + 'den here')"))["output"]
        # What is a comment to whoever reads it as UTF-8 is one to Python too.
        told = await executor.run("# coding: utf-7\n#+AAo-import socket+AAo-print('ran')\n")
        assert (told["status"], told["output"]) == ("success", "")
