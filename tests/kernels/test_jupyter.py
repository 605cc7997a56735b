import asyncio
import hmac
import json
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.environments import Environment
from belljar.errors import EnvironmentBroken, KernelDied, KernelStartFailed
from belljar.kernels.base import Kernel
from belljar.kernels.jupyter import KernelSpec, find_kernelspec, kernel_readable, start_jupyter, zmtp
from belljar.kernels.jupyter import kernel as kernel_module
from belljar.kernels.jupyter.messages import DisplayContent, Message, MessageSigner
from belljar.outputs.events import DisplayData, Stream
from cells import Place, interrupt_when_started, kernelspecs, run

pytestmark = pytest.mark.anyio

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"


@pytest.fixture(scope="module")
def kind() -> str:
    return "jupyter:python3"


@asynccontextmanager
async def opened(place: Place, spec: KernelSpec, *, start_timeout_s: float = 60) -> AsyncIterator[Kernel]:
    sandbox = await place.open_sandbox("s", kernel_readable(spec))
    kernel = await start_jupyter(
        sandbox,
        spec,
        scratch=place.folder / "s/scratch",
        environment=place.variables(sandbox, "s"),
        start_timeout_s=start_timeout_s,
    )
    try:
        yield kernel
    finally:
        await kernel.aclose()


def install(folder: Path, name: str, **told: object) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "kernel.json").write_text(json.dumps({"display_name": name, "language": "any", **told}))
    return folder


# Kernelspecs


def test_an_unknown_kernel_is_refused_with_the_names_of_those_there_are(tmp_path: Path) -> None:
    folder = install(tmp_path, "orchid", argv=["orchid"])
    with pytest.raises(EnvironmentBroken, match="no Jupyter kernel is named 'tulip'") as caught:
        find_kernelspec("tulip", [folder])
    assert "orchid" in caught.value.hint


@pytest.mark.parametrize("name", ["../python3", "", ".", "a\0b", "/etc"])
def test_a_name_is_never_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(EnvironmentBroken, match="no Jupyter kernel is named"):
        find_kernelspec(name, [install(tmp_path, "python3", argv=["python"])])


@pytest.mark.parametrize("told", [{"argv": []}, {"argv": "python"}, {}, {"argv": ["x"], "env": {"A": 1}}])
def test_a_kernelspec_without_form_is_refused_by_name(tmp_path: Path, told: dict[str, object]) -> None:
    with pytest.raises(EnvironmentBroken, match=r"orchid/kernel\.json is not a kernelspec"):
        find_kernelspec("orchid", [install(tmp_path, "orchid", **told)])


def test_the_extra_folders_come_first(tmp_path: Path) -> None:
    first = install(tmp_path / "first", "python3", argv=["one"])
    second = install(tmp_path / "second", "python3", argv=["two"])
    assert find_kernelspec("python3", [first, second]).argv == ("one",)


def test_a_bare_python_is_that_of_the_tree_the_kernelspec_is_in(tmp_path: Path) -> None:
    folder = install(tmp_path / "share/jupyter/kernels", "python3", argv=["python", "-m", "x"])
    assert find_kernelspec("python3", [folder]).executable == "python"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    assert find_kernelspec("python3", [folder]).executable == str(tmp_path / "bin/python")


def test_a_command_names_the_connection_file_and_the_kernels_folder(tmp_path: Path) -> None:
    folder = install(tmp_path, "orchid", argv=["orchid", "--file={connection_file}", "{resource_dir}/x", "{other}"])
    command = find_kernelspec("orchid", [folder]).command("/run/a{resource_dir}.json")
    assert command == ["orchid", "--file=/run/a{resource_dir}.json", f"{folder}/orchid/x", "{other}"]


def test_variables_of_a_kernelspec_are_set_over_those_of_the_session(tmp_path: Path) -> None:
    folder = install(tmp_path, "orchid", argv=["/opt/orchid/bin/orchid"], env={"B": "${A}/b", "C": "${UNKNOWN}"})
    variables = find_kernelspec("orchid", [folder]).variables({"A": "a", "B": "b", "PATH": "/bin"})
    assert variables == {"A": "a", "B": "a/b", "C": "${UNKNOWN}", "PATH": "/opt/orchid/bin:/bin"}


def test_a_python_kernel_needs_its_interpreters_trees(default_environment: Environment) -> None:
    spec = find_kernelspec("python3", [kernelspecs(default_environment)])
    assert set(kernel_readable(spec)) >= {*default_environment.readable, spec.resources}


def test_of_another_program_only_itself_is_shown(tmp_path: Path) -> None:
    program = tmp_path / "bin/orchid"
    program.parent.mkdir()
    program.touch()
    spec = KernelSpec("orchid", (str(program),), {}, tmp_path / "resources")
    assert set(kernel_readable(spec)) == {program, program.resolve(), spec.resources}


# Starting


async def test_a_kernel_that_ends_while_starting_is_quoted(own_place: Place) -> None:
    spec = KernelSpec("orchid", ("/bin/sh", "-c", "echo no water >&2; exit 7"), {}, Path("/usr"))
    with pytest.raises(KernelStartFailed, match="exit status 7") as caught:
        async with opened(own_place, spec):
            pass
    assert "no water" in caught.value.hint


async def test_a_kernel_that_stays_silent_is_given_up(own_place: Place) -> None:
    spec = KernelSpec("orchid", ("/bin/sleep", "600"), {}, Path("/usr"))
    with pytest.raises(KernelStartFailed, match=r"kernel orchid was not ready after 0\.5 s"):
        async with opened(own_place, spec, start_timeout_s=0.5):
            pass


async def test_a_failed_start_leaves_nothing_behind(process_place: Place) -> None:
    before = _descriptors()
    spec = KernelSpec("orchid", ("/bin/sleep", "600"), {}, Path("/usr"))
    with pytest.raises(KernelStartFailed):
        async with opened(process_place, spec, start_timeout_s=0.2):
            pass
    assert _descriptors() == before
    assert list((process_place.folder / "s/scratch").iterdir()) == []


async def test_a_closed_kernel_leaves_nothing_behind(process_place: Place, kind: str) -> None:
    before = _descriptors()
    async with process_place.open(kind) as kernel:
        await run(kernel, "1")
    assert _descriptors() == before
    assert list((process_place.folder / "s/scratch").iterdir()) == []
    assert [task for task in asyncio.all_tasks() if "belljar" in repr(task.get_coro())] == []


async def test_folders_may_have_names_longer_than_a_sockets_address(own_place: Place, kind: str) -> None:
    place = replace(own_place, folder=own_place.folder / ("x" * 120))
    async with place.open(kind) as kernel:
        assert (await run(kernel, "1")).result == {"text/plain": "1"}


# Cells


async def test_a_kernel_can_be_interrupted_by_message(own_place: Place) -> None:
    spec = find_kernelspec("python3", [kernelspecs(own_place.environment)])
    async with opened(own_place, replace(spec, is_interrupted_by_message=True)) as kernel:
        await run(kernel, "kept = 1")
        outcome = await interrupt_when_started(kernel, "print('started', flush=True)\nwhile True: pass")
        assert outcome.error.name == "KeyboardInterrupt"
        assert (await run(kernel, "kept")).result == {"text/plain": "1"}


async def test_an_error_that_only_the_reply_tells_of_is_told(kernel: Kernel) -> None:
    code = (
        "from ipykernel.ipkernel import IPythonKernel\noriginal = IPythonKernel.do_execute\n"
        "async def broken(self, *_, **__):\n    IPythonKernel.do_execute = original\n"
        "    return {'status': 'error', 'ename': 'Wilted', 'evalue': 'dry', 'traceback': ['\\x1b[31mno\\nwater']}\n"
        "IPythonKernel.do_execute = broken"
    )
    await run(kernel, code)
    outcome = await run(kernel, "1")
    assert (outcome.error.name, outcome.error.message, outcome.error.traceback) == ("Wilted", "dry", ["no", "water"])
    assert not outcome.is_ok


async def test_a_cell_whose_end_is_never_announced_ends_with_its_reply(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_module, "IDLE_GRACE_S", 0.1)
    code = (
        "kernel = get_ipython().kernel\npublish = kernel._publish_status\n"
        "def once(*_, **__):\n    kernel._publish_status = publish\n"
        "kernel._publish_status = once"
    )
    outcome = await run(kernel, code)
    assert outcome.events[0] == Stream("stderr", kernel_module.LOST)
    assert outcome.is_ok
    assert (await run(kernel, "1")).result == {"text/plain": "1"}


async def test_a_child_that_holds_the_connections_does_not_hide_the_death(process_place: Place, kind: str) -> None:
    async with process_place.open(kind) as kernel:
        with pytest.raises(KernelDied, match="exit status 3"):
            await run(kernel, "import os, time\nif os.fork() == 0: time.sleep(600)\nos._exit(3)")


async def test_a_kernel_that_asks_although_nobody_can_answer_is_told_so(kernel: Kernel) -> None:
    outcome = await run(kernel, "get_ipython().kernel._allow_stdin = True\ninput('?')", allow_input=False)
    assert outcome.questions == []
    assert outcome.error.name == "EOFError"


async def test_lone_surrogates_spelled_out_in_json_become_question_marks(kernel: Kernel) -> None:
    content = json.dumps({"data": {"text/plain": "a\ud800b"}, "metadata": {}})
    outcome = await run(kernel, _published(f"'display_data', {content!r}.encode()"))
    assert outcome.displays == [DisplayData({"text/plain": "a?b"})]


# Hostile messages

_SIGNED = (
    "import json, uuid\nkernel = get_ipython().kernel\nsession = kernel.session\n"
    "def publish(kind, content):\n"
    "    header = json.dumps({'msg_id': uuid.uuid4().hex, 'msg_type': kind}).encode()\n"
    "    parts = [header, b'{}', b'{}', content]\n"
    "    kernel.iopub_socket.send_multipart([b'<IDS|MSG>', session.sign(parts), *parts])\n"
)


def _published(arguments: str) -> str:
    return f"{_SIGNED}publish({arguments})"


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        (_published('\'stream\', b\'{"name": "stdout", "text": 5}\''), "malformed message"),
        (_SIGNED + "kernel.iopub_socket.send_multipart([b'x'] * 2_000)", "more than 1,024 parts"),
        (_SIGNED + "kernel.iopub_socket.send_multipart([b'x' * 35_000_000] * 2)", "over the limit of 67,108,864 bytes"),
    ],
    ids=["malformed", "many-parts", "large"],
)
async def test_a_message_without_form_ends_the_kernel(
    process_place: Place, kind: str, code: str, complaint: str
) -> None:
    async with process_place.open(kind) as kernel:
        with pytest.raises(KernelDied, match=f"{complaint}.*, so its process was ended"):
            await run(kernel, f"{code}\nwhile True: pass")
        with pytest.raises(KernelDied, match=complaint):
            await run(kernel, "1")


def _parts(header: bytes, parent: bytes, content: bytes, *, key: bytes = b"key") -> list[bytes]:
    signed = [header, parent, b"{}", content]
    return [b"topic", b"<IDS|MSG>", hmac.new(key, b"".join(signed), "sha256").hexdigest().encode(), *signed]


_HEADER = b'{"msg_id": "1", "msg_type": "display_data"}'
_CONTENT = b'{"data": {"text/plain": "a"}}'


def test_a_message_with_form_is_read() -> None:
    message = MessageSigner("key").unpack(_parts(_HEADER, b'{"msg_id": "0"}', _CONTENT))
    assert message == Message("1", "0", DisplayContent(data={"text/plain": "a"}))


def test_data_of_too_many_values_is_left_out_and_said_so() -> None:
    figure = b'{"data": {"application/json": [' + b"0," * 200_000 + b"0]}}"
    message = MessageSigner("key").unpack(_parts(_HEADER, b"{}", figure))
    said = "<data of more than 100,000 values was left out>"
    assert message == Message("1", "", DisplayContent(data={"text/plain": said}))


def test_a_message_of_an_unknown_kind_is_passed_over() -> None:
    assert MessageSigner("key").unpack(_parts(b'{"msg_id": "1", "msg_type": "comm_open"}', b"{}", b"nothing")) is None


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ([], "no Jupyter message"),
        ([b"hello"], "no Jupyter message"),
        (_parts(_HEADER, b"{}", _CONTENT)[:-1], "no Jupyter message"),
        (_parts(_HEADER, b"{}", _CONTENT, key=b"other"), "wrong signature"),
        (_parts(b"[]", b"{}", _CONTENT), "no header"),
        (_parts(b'{"msg_id": 1, "msg_type": "stream"}', b"{}", _CONTENT), "no header"),
        (_parts(b'{"msg_id": "1", "msg_type": ["stream"]}', b"{}", _CONTENT), "no header"),
        (_parts(_HEADER, b"[]", _CONTENT), "no parent"),
        (_parts(_HEADER, b"{}", b"{"), "no display"),
        (_parts(_HEADER, b"{}", b"\xff\xff"), "no display"),
        (_parts(_HEADER, b"{}", b'{"data": []}'), "no display"),
        (_parts(_HEADER, b"{}", b'{"data": {}, "transient": {"display_id": 5}}'), "no display"),
        (_parts(_HEADER, b"{}", b"[" * 90_000), "no display"),
        (_parts(_HEADER, b"{}", b'{"data": {"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}}"), "no display"),
    ],
)
def test_a_message_without_form_is_refused(parts: list[bytes], complaint: str) -> None:
    with pytest.raises(KernelDied, match=complaint):
        MessageSigner("key").unpack(parts)


async def test_garbage_on_the_connections_ends_the_kernel(process_place: Place, kind: str) -> None:
    code = (
        "import os, stat\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try:\n        is_socket = stat.S_ISSOCK(os.fstat(int(name)).st_mode)\n"
        "        is_socket and os.write(int(name), b'\\xff' * 1000)\n"
        "    except OSError: pass\n"
        "while True: pass"
    )
    async with process_place.open(kind) as kernel:
        with pytest.raises(KernelDied, match="so its process was ended"):
            await run(kernel, code)


@asynccontextmanager
async def served(folder: Path, sent: bytes) -> AsyncIterator[Path]:
    """A socket whose listener says these bytes to whoever connects."""

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(sent)
            await writer.drain()
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_unix_server(on_client, folder / "socket"):
        yield folder / "socket"


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" * 9, "does not speak ZMTP 3"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "does not speak ZMTP 3"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "does not speak ZMTP 3"),
        (GREETING + b"\x04\x0d\x05ERROR\x06go off", "refused a SUB peer"),
        (GREETING + b"\x00\x02hi", "refused a SUB peer"),
        (GREETING + b"\x06" + struct.pack("!Q", 2**63), "over the limit"),
    ],
    ids=["http", "version", "encrypted", "refused", "no-ready", "large-command"],
)
async def test_a_peer_that_greets_wrongly_is_refused(tmp_path: Path, sent: bytes, complaint: str) -> None:
    async with served(tmp_path, sent) as path:
        with pytest.raises(KernelDied, match=complaint):
            await zmtp.open_connection(path, "SUB", b"me")


async def test_a_peer_that_hangs_up_while_greeting_is_no_connection(tmp_path: Path) -> None:
    async def on_client(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING[:20])
        writer.close()

    async with await asyncio.start_unix_server(on_client, tmp_path / "socket"):
        with pytest.raises(ConnectionError):
            await zmtp.open_connection(tmp_path / "socket", "SUB", b"me")


async def test_a_ping_between_messages_is_answered(tmp_path: Path) -> None:
    heard = asyncio.get_running_loop().create_future()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + READY + b"\x04\x09\x04PING\0\0hi" + b"\x01\x01a\x00\x01b")
        try:
            heard.set_result(await reader.readuntil(b"\x04PONGhi"))
        finally:
            writer.close()

    async with await asyncio.start_unix_server(on_client, tmp_path / "socket"):
        connection = await zmtp.open_connection(tmp_path / "socket", "SUB", b"me")
        try:
            assert await connection.receive() == [b"a", b"b"]
            await asyncio.wait_for(heard, 10)
        finally:
            await connection.aclose()


async def test_a_link_in_the_place_of_a_socket_is_not_followed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "real"))
        listener.listen()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(KernelDied, match="something else than a socket"):
            await zmtp.open_connection(tmp_path / "link", "SUB", b"me")


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
