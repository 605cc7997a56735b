"""What a cell printed and showed reads in the order it happened, in the one text that every client shows."""

import re
from collections.abc import AsyncGenerator

import pytest
from calls import Caller, connected, held, images, opened_runtime, text_of, until_said
from mcp.types import CallToolResult

from belljar.environments import Environment
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio

PICTURES = (
    "import base64, struct, sys, zlib\n"
    "from IPython.display import HTML, Image, clear_output, display, update_display\n"
    "def chunk(kind, data):\n"
    "    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))\n"
    "def picture(width):\n"
    "    rows = zlib.compress((b'\\0' + b'\\xff' * 3 * width))\n"
    "    head = chunk(b'IHDR', struct.pack('>IIBBBBB', width, 1, 8, 2, 0, 0, 0))\n"
    "    return Image(b'\\x89PNG\\r\\n\\x1a\\n' + head + chunk(b'IDAT', rows) + chunk(b'IEND', b''))\n"
)


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    async with opened_runtime(
        default_environment, tmp_path_factory.mktemp("belljar"), output_budget_chars=400
    ) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def session_id(runtime: Runtime) -> str:
    async with connected(runtime) as caller:
        return (await caller.execute(PICTURES)).session_id


async def lines_of(caller: Caller, code: str, session_id: str) -> list[str]:
    answer = await caller.call("execute_code", code=code, session_id=session_id)
    return read(answer)


def read(answer: CallToolResult) -> list[str]:
    """The text without its footer, and without addresses."""
    body = text_of(answer).partition("\n\n[")[0]
    return re.sub(r"(?:execution|kernel)://\S+?(?=\]|\s)", "URI", body).splitlines()


async def test_prints_displays_and_the_value_come_in_their_order(caller: Caller, session_id: str) -> None:
    code = (
        "print('one'); display(picture(2)); print('two', end=''); display(HTML('<b>3</b>'), picture(4))\n"
        "print('five', file=sys.stderr); display('six'); print('seven'); picture(8)"
    )
    answer = await caller.call("execute_code", code=code, session_id=session_id)
    assert read(answer) == [
        "one",
        "[image/png 1 URI]",
        "two",
        "<b>3</b>",
        "[image/png 2 URI]",
        "five",
        "'six'",
        "seven",
        "Out[2]: <IPython.core.display.Image object>",
        "[image/png 3 URI]",
    ]
    assert len(images(answer)) == 3
    result = await caller.execute("print(1); display(picture(3)); print(2); picture(5)", session_id)
    assert [display.at for display in result.displays] == [1, None]
    assert result.output == ["1\n", "2\n"]


async def test_an_update_keeps_its_place_and_a_clear_forgets_the_places(caller: Caller, session_id: str) -> None:
    updated = "print('a'); display(picture(2), display_id='x'); print('b'); update_display(picture(3), display_id='x')"
    assert await lines_of(caller, updated, session_id) == ["a", "[image/png 1 URI]", "b"]
    cleared = "print('a'); display(picture(2)); clear_output(); print('b'); display(picture(3)); print('c')"
    assert await lines_of(caller, cleared, session_id) == ["b", "[image/png 1 URI]", "c"]


async def test_one_picture_at_two_places_is_named_at_both_and_sent_once(caller: Caller, session_id: str) -> None:
    code = (
        "print('a'); display(picture(2)); print('b'); display(picture(3)); display(picture(2)); print('c'); picture(2)"
    )
    answer = await caller.call("execute_code", code=code, session_id=session_id)
    first, second = "[image/png 1 URI]", "[image/png 2 URI]"
    value = read(answer)[-2]
    assert value.startswith("Out[")
    assert read(answer) == ["a", first, "b", second, first, "c", value, first]
    assert len(images(answer)) == 2
    # At one place it is named once, also when it is the value.
    assert (await lines_of(caller, "display(picture(2)); display(picture(2)); picture(2)", session_id))[:1] == [first]


async def test_displays_between_text_that_is_left_out_are_still_named(caller: Caller, session_id: str) -> None:
    code = "for n in range(4): print(f'{n}' * 300); display(picture(n + 1))\nprint('end')"
    lines = await lines_of(caller, code, session_id)
    assert [line for line in lines if line.startswith("[image")] == [f"[image/png {n} URI]" for n in (1, 2, 3, 4)]
    assert lines.index("[image/png 4 URI]") == lines.index("end") - 1


async def test_a_page_of_a_running_cell_has_its_own_order_and_says_how_to_go_on(
    runtime: Runtime, caller: Caller, session_id: str
) -> None:
    code = f"print('first'); display(picture(2))\n{held()}\nprint('second'); display(picture(3)); print('third')"
    running = await caller.execute(code, session_id, wait_s=0)
    await until_said(runtime, running.execution_id, "held")
    running = await caller.get(running.execution_id)
    assert running.next is not None
    assert running.next.tool == "get_execution"
    assert running.next.arguments == {"execution_id": running.execution_id, "since": running.sequence, "wait_s": 45}
    await caller.release(session_id)
    page = await caller.call(running.next.tool, **running.next.arguments)
    assert read(page)[:3] == ["second", "[image/png 1 URI]", "third"]
    whole = await caller.get(running.execution_id)
    assert (whole.next, [display.at for display in whole.displays]) == (None, [1, 2])
