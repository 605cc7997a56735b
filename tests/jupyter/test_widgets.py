"""Widgets of a session and their views in a front end, over comms."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from front_ends import FrontEnd, Ran, started

pytest.importorskip("ipywidgets", reason="ipywidgets is not installed beside belljar, where these sessions run")

IMPORTS = "import comm\nimport ipywidgets as widgets"
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def front_end(installed: Path) -> Iterator[FrontEnd]:
    """Of a kernel whose sessions run in the environment of the tests, shared by all of them."""
    told = json.loads((installed / "kernel.json").read_text())
    told["env"]["BELLJAR_ENVIRONMENT"] = sys.executable
    (installed.parent / "widgets").mkdir()
    (installed.parent / "widgets/kernel.json").write_text(json.dumps(told))
    with started("widgets") as (front_end, _):
        front_end.run(IMPORTS)
        yield front_end


def send(
    front_end: FrontEnd,
    kind: str,
    content: dict[str, Any],
    *,
    on_output: Callable[[dict[str, Any]], None] = lambda _: None,
    **more: Any,
) -> Ran:
    """Say something to a comm, and what the kernel publishes until it is idle again."""
    client = front_end.client
    message = client.session.msg(kind, content, metadata=more.get("metadata"))
    client.session.send(client.shell_channel.socket, message, buffers=more.get("buffers"))
    outputs: list[dict[str, Any]] = []
    while not outputs or outputs[-1]["content"].get("execution_state") != "idle":
        said = client.get_iopub_msg(timeout=60)
        if said["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            outputs.append(said)
            on_output(said)
    return Ran({}, outputs)


def kinds(ran: Ran) -> list[str]:
    return [said["msg_type"] for said in ran.outputs if said["msg_type"] not in ("status", "execute_input")]


def model_of(ran: Ran) -> str:
    return ran.of("display_data")[-1]["data"][VIEW]["model_id"]


def update(front_end: FrontEnd, model: str, **state: Any) -> Ran:
    data = {"method": "update", "state": state, "buffer_paths": []}
    return send(front_end, "comm_msg", {"comm_id": model, "data": data})


def test_a_widget_is_there_before_the_display_that_names_it(front_end: FrontEnd) -> None:
    ran = front_end.run("print('before')\ndisplay(widgets.IntSlider(3))\nprint('after')")
    assert kinds(ran) == ["stream", "comm_open", "comm_open", "comm_open", "display_data", "stream"]
    opened = ran.of("comm_open")[-1]
    assert opened["target_name"] == "jupyter.widget"
    assert opened["comm_id"] == model_of(ran)
    assert opened["data"]["state"]["value"] == 3
    assert ran.of("display_data")[0]["data"]["text/plain"] == "IntSlider(value=3)"
    assert next(said for said in ran.outputs if said["msg_type"] == "comm_open")["metadata"]["version"]


def test_a_slider_that_is_moved_calls_back(front_end: FrontEnd) -> None:
    ran = front_end.run(
        "slider, label = widgets.IntSlider(3), widgets.Label()\n"
        "def tell(change):\n    print('now', change['new'])\n    label.value = 'moved'\n"
        "slider.observe(tell, 'value')\ndisplay(slider)"
    )
    moved = update(front_end, model_of(ran), value=8)
    assert moved.text() == "now 8\n"
    assert {"value": "moved"} in [said["data"]["state"] for said in moved.of("comm_msg")]
    assert [said["execution_state"] for said in moved.of("status")] == ["busy", "idle"]
    assert front_end.run("slider.value, label.value").result == "(8, 'moved')"


def test_an_output_widget_claims_what_is_shown_inside_of_it(front_end: FrontEnd) -> None:
    ran = front_end.run("@widgets.interact(n=5)\ndef square(n):\n    print(n * n)")
    slider = next(
        said["comm_id"] for said in ran.of("comm_open") if said["data"]["state"]["_model_name"] == "IntSliderModel"
    )
    for shown, text in ((ran, "25\n"), (update(front_end, slider, value=6), "36\n")):
        request_id = shown.outputs[0]["parent_header"]["msg_id"]
        order = [
            said["content"]["data"]["state"]["msg_id"] if said["msg_type"] == "comm_msg" else said["msg_type"]
            for said in shown.outputs
            if said["msg_type"] in ("stream", "clear_output") or "msg_id" in _state(said)
        ]
        assert order == [request_id, "clear_output", "stream", ""]
        assert shown.text() == text


def _state(said: dict[str, Any]) -> dict[str, Any]:
    return said["content"].get("data", {}).get("state", {}) if said["msg_type"] == "comm_msg" else {}


def test_binary_parts_go_both_ways(front_end: FrontEnd) -> None:
    ran = front_end.run(
        "bare = comm.create_comm(target_name='bare', data={'a': 1}, buffers=[b'\\0\\xff', memoryview(b'abc')])\n"
        "bare.on_msg(lambda said: bare.send(said['content']['data'], said['metadata'], said['buffers'][::-1]))"
    )
    (opened,) = [said for said in ran.outputs if said["msg_type"] == "comm_open"]
    assert [bytes(part) for part in opened["buffers"]] == [b"\0\xff", b"abc"]
    content = {"comm_id": opened["content"]["comm_id"], "data": {"b": [1.5, None]}}
    echoed = send(front_end, "comm_msg", content, metadata={"m": 1}, buffers=[b"one", b"two"])
    (answer,) = [said for said in echoed.outputs if said["msg_type"] == "comm_msg"]
    assert (answer["content"], answer["metadata"]) == (content, {"m": 1})
    assert [bytes(part) for part in answer["buffers"]] == [b"two", b"one"]


def test_a_front_end_that_comes_later_finds_the_widgets(front_end: FrontEnd) -> None:
    model = model_of(front_end.run("late = widgets.Text('here')\ndisplay(late)\nlate.value = 'changed'"))
    found = front_end.ask(front_end.client.comm_info, "jupyter.widget")["comms"]
    assert found[model] == {"target_name": "jupyter.widget"}
    assert front_end.ask(front_end.client.comm_info, "no such target")["comms"] == {}
    control = {"comm_id": "control", "target_name": "jupyter.widget.control", "data": {}}
    assert kinds(send(front_end, "comm_open", control, metadata={"version": "1.0.0"})) == []
    states = send(front_end, "comm_msg", {"comm_id": "control", "data": {"method": "request_states"}})
    assert states.of("comm_msg")[0]["data"]["states"][model]["state"]["value"] == "changed"


def test_what_nobody_in_the_session_knows_is_closed_again(front_end: FrontEnd) -> None:
    opened = send(front_end, "comm_open", {"comm_id": "stray", "target_name": "no such target", "data": {}})
    assert opened.of("comm_close") == [{"comm_id": "stray", "data": {}}]
    assert kinds(send(front_end, "comm_msg", {"comm_id": "stray", "data": {}})) == []
    assert kinds(send(front_end, "comm_close", {"comm_id": "stray", "data": {}})) == []


def test_a_callback_that_fails_is_shown_and_one_that_lasts_is_interrupted(front_end: FrontEnd) -> None:
    ran = front_end.run(
        "button = widgets.Button()\n"
        "def press(_):\n    print('pressed', flush=True)\n    while True: pass\n"
        "button.on_click(lambda _: 1 / 0)\ndisplay(button)"
    )
    click = {"comm_id": model_of(ran), "data": {"method": "custom", "content": {"event": "click"}}}
    assert send(front_end, "comm_msg", click).of("error")[0]["ename"] == "ZeroDivisionError"
    front_end.run("button.on_click(press)")
    client = front_end.client

    def on_output(said: dict[str, Any]) -> None:
        if said["msg_type"] == "stream":
            client.control_channel.send(client.session.msg("interrupt_request", {}))

    errors = send(front_end, "comm_msg", click, on_output=on_output).of("error")
    assert [error["ename"] for error in errors] == ["ZeroDivisionError", "KeyboardInterrupt"]
    assert front_end.run("1").result == "1"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("comm.create_comm(data={}, buffers=[bytes(20_000_000)])", "ValueError"),
        ("comm.create_comm(data={}, buffers=[b''] * 2_000)", "ValueError"),
        ("comm.create_comm(comm_id='x' * 1_000)", "ValueError"),
        ("comm.create_comm(data=[1])", "TypeError"),
    ],
)
def test_what_cannot_be_sent_is_an_error_of_the_cell(front_end: FrontEnd, code: str, name: str) -> None:
    assert front_end.run(code).of("error")[0]["ename"] == name
    assert front_end.run("1").result == "1"


def test_a_death_in_a_callback_is_told_and_the_next_cell_has_a_fresh_kernel(front_end: FrontEnd) -> None:
    ran = front_end.run("import os\nend = comm.create_comm(target_name='end')\nend.on_msg(lambda _: os._exit(3))")
    died = send(front_end, "comm_msg", {"comm_id": ran.of("comm_open")[0]["comm_id"], "data": {}})
    assert died.of("error")[0]["ename"] == "died"
    front_end.run(IMPORTS)
    assert front_end.run("'end' in globals()").result == "False"
