import base64
import math

import pytest
from data_plane import NEW, OLD, OTHER_KEY, Plane, problem_in

from waiting import until

pytestmark = pytest.mark.anyio


async def test_an_execution_answers_with_every_field(plane: Plane) -> None:
    answer = await plane.ask("POST", "/executions", json={"code": "print('hi')\n1 + 1"})
    body = answer.json()
    time = body["result"].pop("executionTimeInMilliseconds")
    assert isinstance(time, int)
    assert body == {
        "id": answer.headers["operation-id"],
        "identifier": plane.identifier,
        "executionType": "Synchronous",
        "status": "Succeeded",
        "result": {"stdout": "hi\n", "stderr": "", "executionResult": 2},
    }
    shown = await plane.client.get(answer.headers["operation-location"])
    assert shown.json()["result"]["stdout"] == "hi\n"


async def test_variables_stay_under_one_identifier_and_are_another_ones_secret(plane: Plane) -> None:
    await plane.execute("kept = 41")
    assert (await plane.execute("kept + 1"))["result"]["executionResult"] == 42
    async with plane.client.stream("GET", "/health"):
        pass
    theirs = Plane(plane.client, plane.identifier)
    answer = await theirs.ask(
        "POST", "/executions", json={"code": "kept"}, headers={"authorization": f"Bearer {OTHER_KEY}"}
    )
    assert "NameError" in answer.json()["result"]["stderr"]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("3.5", 3.5),
        ("True", True),
        ("None", None),
        ("'text'", "text"),
        ("[1, 'two', None]", [1, "two", None]),
        ("{'a': (1, 2)}", {"a": [1, 2]}),
        ("float('nan')", "nan"),
        ("float('inf')", "inf"),
        ("{1: 2}", "{1: 2}"),
        ("{1}", "{1}"),
        ("b'bytes'", "b'bytes'"),
        ("list(range(2000))[-1:], ...", "([1999], Ellipsis)"),
        ("import numpy; numpy.float64(1.5)", 1.5),
    ],
)
async def test_values_are_json_where_they_have_a_form_in_it(plane: Plane, code: str, value: object) -> None:
    result = (await plane.execute(code))["result"]["executionResult"]
    assert result == value


async def test_old_versions_print_lists_as_text_and_have_all_their_keys(plane: Plane) -> None:
    old = Plane(plane.client, plane.identifier, OLD)
    answer = await old.execute_old("print('out'); [1, 2]")
    assert isinstance(answer.pop("executionTimeInMilliseconds"), int)
    expected = {"$id": "2", "status": "Success", "stdout": "out\n", "stderr": ""}
    assert answer == {**expected, "result": "[1, 2]", "executionResult": "[1, 2]"}
    assert (await old.execute_old("'text'"))["result"] == "text"
    silent = await old.execute_old("x = 1")
    assert (silent["result"], silent["executionResult"]) == ("", ""), "clients print what they find"
    failed = await old.execute_old("1 / 0")
    assert (failed["status"], failed["result"]) == ("Failure", "")
    assert "ZeroDivisionError: division by zero" in failed["stderr"]


async def test_a_figure_is_a_picture_in_base64(plane: Plane) -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])"
    figure = (await plane.execute(code))["result"]["executionResult"]
    assert (figure["type"], figure["format"]) == ("image", "png")
    assert base64.b64decode(figure["base64_data"]).startswith(b"\x89PNG")
    old = Plane(plane.client, plane.identifier, OLD)
    answer = await old.execute_old("plt.plot([1, 2]); plt.show()")
    assert (answer["result"]["format"], answer["executionResult"]) == ("png", ""), "once"
    newer = Plane(plane.client, plane.identifier, "2024-08-02-preview")
    answer = await newer.execute_old("plt.plot([1, 2]); plt.show()")
    assert (answer["executionResult"]["format"], answer["result"]) == ("png", ""), "once"


async def test_listing_packages_says_nothing_on_stderr(plane: Plane) -> None:
    code = "import pkg_resources\n[(one.project_name, one.version) for one in pkg_resources.working_set]"
    old = await plane.other(version=OLD).execute_old(code)
    assert (old["stderr"], old["stdout"]) == ("", "")
    assert old["result"].startswith("[(")
    warned = await plane.execute("import warnings; warnings.warn('something else')")
    assert "something else" in warned["result"]["stderr"]


async def test_code_that_raises_has_failed_with_its_traceback_in_stderr(plane: Plane) -> None:
    body = await plane.execute("import sys\nprint('warned', file=sys.stderr)\n1 / 0")
    assert body["status"] == "Failed"
    assert body["error"]["error"]["code"] == "CodeRaised"
    assert body["error"]["error"]["message"] == "ZeroDivisionError: division by zero"
    stderr = body["result"]["stderr"]
    assert stderr.startswith("warned\n")
    assert stderr.endswith("ZeroDivisionError: division by zero")


async def test_code_may_come_in_base64_and_words_in_any_case(plane: Plane) -> None:
    code = base64.b64encode(b"'\xc3\xa4'").decode()
    body = await plane.execute(code, codeInputType="inlineBASE64", executionType="synchronous", unknown=1)
    assert body["result"]["executionResult"] == "ä"
    assert (await plane.execute("2", codeInputType="InlineText"))["result"]["executionResult"] == 2


async def test_an_asynchronous_execution_answers_at_once_and_is_polled(plane: Plane) -> None:
    code = "import os, time\nprint('held', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.005)\n'done'"
    begun = await plane.execute(code, executionType="Asynchronous")
    assert begun["status"] in ("NotStarted", "Running")

    async def shown() -> dict:
        return await plane.ok("GET", f"/executions/{begun['id']}")

    async def is_held() -> bool:
        return (await shown())["result"]["stdout"] == "held\n"

    await until(is_held)
    assert (await shown())["status"] == "Running"
    await plane.upload("go", b"")

    async def is_done() -> bool:
        return (await shown())["status"] == "Succeeded"

    await until(is_done)
    assert (await shown())["executionType"] == "Asynchronous"
    assert (await shown())["result"]["executionResult"] == "done"


async def test_an_operation_id_runs_once_and_belongs_to_its_code(plane: Plane) -> None:
    headers = {"operation-id": "operation-1"}
    body = {"code": "ran = globals().get('ran', 0) + 1\nran"}
    first = (await plane.ask("POST", "/executions", json=body, headers=headers)).json()
    again = (await plane.ask("POST", "/executions", json=body, headers=headers)).json()
    assert (first["id"], first["result"]) == ("operation-1", again["result"])
    assert (await plane.ok("GET", "/executions/operation-1"))["result"] == first["result"]
    changed = await plane.ask("POST", "/executions", json={"code": "2"}, headers=headers)
    problem_in(changed, 409, "OperationIdConflict", "operation-id")
    elsewhere = plane.other("identifier-elsewhere")
    problem_in(await elsewhere.ask("GET", "/executions/operation-1"), 404, "ExecutionNotFound")
    apart = await elsewhere.ask("POST", "/executions", json={"code": "2"}, headers=headers)
    assert apart.json()["result"]["executionResult"] == 2


async def test_a_timeout_is_a_failure_that_keeps_variables(plane: Plane) -> None:
    body = await plane.execute("before = 5\nwhile True: pass", timeoutInSeconds=0.5)
    assert (body["status"], body["error"]["error"]["code"]) == ("Failed", "ExecutionTimeout")
    assert "timeout: interrupted after 0.5 s" in body["result"]["stderr"]
    assert (await plane.execute("before"))["result"]["executionResult"] == 5


async def test_long_streams_are_cut_from_the_middle(plane: Plane) -> None:
    code = "print('a' * 50_000 + 'z'); import sys; print('b' * 300, file=sys.stderr)"
    body = await plane.execute(code, outputStreamsMaxLength=100)
    stdout, stderr = body["result"]["stdout"], body["result"]["stderr"]
    assert len(stdout) < 200
    assert stdout.startswith("aaaa")
    assert stdout.endswith("az\n")
    assert "left out here" in stdout
    assert "left out here" in stderr
    whole = await plane.execute(code, outputStreamsMaxLength=1_000_000)
    assert whole["result"]["stdout"] == "a" * 50_000 + "z\n"


async def test_a_printed_data_uri_goes_out_whole(plane: Plane) -> None:
    content = bytes(range(256)) * 16_000  # 4 MB
    uri = f"data:application/zip;base64,{base64.b64encode(content).decode()}"
    make = (
        "import base64\nuri = 'data:application/zip;base64,' + base64.b64encode(bytes(range(256)) * {times}).decode()\n"
    )
    body = await plane.execute(f"{make.format(times=16_000)}print('x' * 30_000, uri, 'end')")
    assert uri in body["result"]["stdout"]
    assert body["result"]["stdout"].endswith(f"{uri} end\n")
    assert "left out here" in body["result"]["stdout"]
    assert len(body["result"]["stdout"]) < len(uri) + 21_000
    assert body["result"]["stderr"] == ""
    assert (await plane.execute("uri"))["result"]["executionResult"] == uri
    old = await plane.other(version=OLD).execute_old(f"{make.format(times=100)}print(uri)")
    assert old["stdout"] == f"data:application/zip;base64,{base64.b64encode(content[: 100 * 256]).decode()}\n"
    larger = await plane.execute(f"{make.format(times=20_000)}print(uri)")
    assert "base64" not in larger["result"]["stdout"], "not in part"
    assert "a data: URI of 6,826,696 characters is left out here" in larger["result"]["stdout"]
    assert not [file for file in (await plane.ok("GET", "/files"))["value"] if file["name"].startswith("data-")]


async def test_a_shell_command_answers_with_its_exit_status_as_text(plane: Plane) -> None:
    await plane.execute("HOME = 'a variable of Python'")
    body = await plane.ok("POST", "/executions", json={"shellCommand": "echo $HOME {a,b}; echo no >&2; exit 3"})
    assert body["status"] == "3"
    assert int(body["status"]) == 3
    assert "Python" not in body["result"]["stdout"]
    assert body["result"]["stdout"].endswith("a b\n")
    assert body["result"]["stderr"] == "no\n"
    assert set(body) == {"id", "identifier", "status", "result"}
    assert set(body["result"]) == {"stdout", "stderr", "executionTimeInMilliseconds"}
    typed = {"codeInputType": "Inline", "executionType": "Synchronous", "shellCommand": "echo hi > made.txt"}
    assert (await plane.ok("POST", "/executions", json=typed))["status"] == "0"
    assert (await plane.execute("open('made.txt').read()"))["result"]["executionResult"] == "hi\n"
    slow = await plane.ok("POST", "/executions", json={"shellCommand": "sleep 60", "timeoutInSeconds": 0.3})
    assert slow["status"] == "124"
    assert slow["result"]["stderr"].startswith("timeout: interrupted after 0.3 s"), "no traceback of ours"
    killed = await plane.ok("POST", "/executions", json={"shellCommand": "kill -9 $$"})
    assert killed["status"] == "137"


async def test_addresses_may_have_the_prefix_of_a_pool_and_stray_slashes(plane: Plane) -> None:
    prefix = "/subscriptions/s/resourceGroups/g/sessionPools/pool"
    body = {"code": "1 + 1"}
    slashes = f"{plane.client.base_url}//executions/"
    for path in (f"{prefix}/executions", slashes, f"{prefix}//executions//", "/Executions"):
        answer = await plane.ask("POST", path, json=body)
        assert answer.json()["result"]["executionResult"] == 2, path
    located = (await plane.ask("POST", f"{prefix}/executions", json=body)).headers["operation-location"]
    assert f"{prefix}/executions/" in located
    assert (await plane.client.get(located)).status_code == 200
    tutorial = f"{prefix}/identifier/{plane.identifier}/executions"
    answer = await plane.client.post(tutorial, params={"api-version": NEW}, json=body)
    assert answer.json()["identifier"] == plane.identifier


async def test_times_and_numbers_are_as_json_has_them(plane: Plane) -> None:
    body = await plane.execute("import time; time.sleep(0.05)")
    assert 50 <= body["result"]["executionTimeInMilliseconds"] < 60_000
    assert not math.isnan(body["result"]["executionTimeInMilliseconds"])
