"""Requests that a client should not make: Azure's envelope each time, nothing lost, the server alive."""

from typing import Any

import pytest
from data_plane import NEW, OLD, Plane, problem_in

pytestmark = pytest.mark.anyio

BOUNDARY = {"content-type": "multipart/form-data; boundary=edge"}
HEAD = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n'


@pytest.fixture(autouse=True)
async def alive(plane: Plane):
    """After each request the session is as it was, and answers."""
    await plane.execute("kept = 41")
    yield
    assert (await plane.execute("kept + 1"))["result"]["executionResult"] == 42


async def refused(plane: Plane, method: str, path: str, status: int, code: str, target: str | None, **options: Any):
    return problem_in(await plane.ask(method, path, **options), status, code, target)


async def test_a_wrong_or_missing_version_is_told_with_those_there_are(plane: Plane) -> None:
    query = {"identifier": plane.identifier}
    for path in ("/executions", "/code/execute", "/files/upload"):
        missing = await plane.client.post(path, params=query, json={"code": "1"})
        assert NEW in problem_in(missing, 400, "MissingApiVersionParameter", "api-version")
        wrong = await plane.client.post(path, params={**query, "api-version": "2023-01-01"}, json={"code": "1"})
        said = problem_in(wrong, 400, "InvalidApiVersion", "api-version")
        assert OLD in said
        assert NEW in said


@pytest.mark.parametrize("identifier", ["abc", "x" * 129, "line\nbreak", "back\\slash", "spa ce", "ünïcode"])
async def test_identifiers_that_azure_refuses_are_refused_and_not_quoted(plane: Plane, identifier: str) -> None:
    other = Plane(plane.client, identifier)
    said = await refused(other, "POST", "/executions", 400, "InvalidRequest", "identifier", json={"code": "1"})
    assert identifier not in said
    await refused(other, "GET", "/files", 400, "InvalidRequest", "identifier")


async def test_an_identifier_may_have_every_sign_that_azure_allows(plane: Plane) -> None:
    signs = Plane(plane.client, """a0_|}{[]:";'<>?/.,@#$%^&*()-+=!~`""")
    assert (await signs.upload("x", b"1"))["sizeInBytes"] == 1
    answer = await signs.ask("POST", "/executions", json={"code": "2"})
    assert (await plane.client.get(answer.headers["operation-location"])).json()["identifier"] == signs.identifier


@pytest.mark.parametrize("body", [b"no JSON", b"[]", b"7", b"null", b"\xff\xfe", b"[" * 100_000, b""])
async def test_bodies_that_are_no_json_objects_are_refused(plane: Plane, body: bytes) -> None:
    await refused(plane, "POST", "/executions", 400, "InvalidRequest", "body", content=body)
    old = Plane(plane.client, plane.identifier, OLD)
    await refused(old, "POST", "/code/execute", 400, "InvalidRequest", "body", content=body)


@pytest.mark.parametrize(
    ("fields", "target"),
    [
        ({}, "code"),
        ({"code": 7}, "code"),
        ({"code": "!", "codeInputType": "InlineBase64"}, "code"),
        ({"code": "/////w==", "codeInputType": "InlineBase64"}, "code"),
        ({"code": "1", "codeInputType": "File"}, "codeInputType"),
        ({"code": "1", "executionType": "Later"}, "executionType"),
        ({"code": "1", "executionType": ["Synchronous"]}, "executionType"),
        ({"code": "1", "timeoutInSeconds": 0}, "timeoutInSeconds"),
        ({"code": "1", "timeoutInSeconds": "soon"}, "timeoutInSeconds"),
        ({"code": "1", "timeoutInSeconds": True}, "timeoutInSeconds"),
        ({"code": "1", "outputStreamsMaxLength": -1}, "outputStreamsMaxLength"),
        ({"shellCommand": 1}, "shellCommand"),
    ],
)
async def test_fields_are_refused_by_name(plane: Plane, fields: dict[str, Any], target: str) -> None:
    await refused(plane, "POST", "/executions", 400, "InvalidRequest", target, json=fields)


async def test_numbers_beyond_all_measure_are_numbers(plane: Plane) -> None:
    fields = b'{"code": "1", "timeoutInSeconds": 1' + b"0" * 400 + b', "outputStreamsMaxLength": 1' + b"0" * 400 + b"}"
    assert (await plane.ok("POST", "/executions", content=fields))["status"] == "Succeeded"
    nan = b'{"code": "1", "timeoutInSeconds": NaN}'
    await refused(plane, "POST", "/executions", 400, "InvalidRequest", "timeoutInSeconds", content=nan)


async def test_a_body_of_200_mb_is_refused_before_it_is_read(plane: Plane) -> None:
    body = b'{"code": "' + b"x" * 200_000_000 + b'"}'
    await refused(plane, "POST", "/executions", 413, "RequestTooLarge", "body", content=body)

    async def unannounced():
        for _ in range(20):
            yield b"x" * 1_000_000

    await refused(plane, "POST", "/executions", 413, "RequestTooLarge", "body", content=unannounced())


@pytest.mark.parametrize(
    "name", [b"../up.txt", b"/etc/passwd", b"a/../../b", b"nul\0", b"x" * 300, b"/".join([b"d"] * 70), b"..", b"/"]
)
async def test_file_names_that_leave_the_folder_are_refused(plane: Plane, name: bytes) -> None:
    body = HEAD % name + b"1\r\n--edge--\r\n"
    await refused(plane, "POST", "/files", 400, "InvalidRequest", "file", content=body, headers=BOUNDARY)
    assert "up.txt" not in (await plane.ask("GET", "/files")).text


@pytest.mark.parametrize("name", ["..%2Fup", "%2Fetc%2Fpasswd", "nul%00", "x" * 300, "%FF%FE", "%ED%A0%80"])
async def test_addresses_of_no_file_are_refused(plane: Plane, name: str) -> None:
    for method in ("GET", "DELETE"):
        answer = await plane.ask(method, f"/files/{name}")
        assert answer.status_code in (400, 404)
        problem_in(answer, answer.status_code, answer.json()["error"]["code"], "name")
    problem_in(await plane.ask("GET", "/files", params={"path": "../.."}), 400, "InvalidRequest", "path")


@pytest.mark.parametrize(
    ("body", "target"),
    [
        (HEAD % b"x" + b"content", "body"),
        (HEAD % b"x" + b"content\r\n--edge", "body"),
        (b"", "body"),
        (b"not multipart at all", "body"),
        (b'--edge\r\nContent-Disposition: form-data; name="other"\r\n\r\n1\r\n--edge--\r\n', "file"),
        (HEAD % b"" + b"1\r\n--edge--\r\n", "file"),
        (HEAD % b"a" + b"1\r\n" + HEAD % b"b" + b"2\r\n--edge--\r\n", "file"),
        (b"--edge\r\n" + b"X: " + b"y" * 40_000, "body"),
    ],
)
async def test_multipart_bodies_that_are_not_whole_leave_nothing(plane: Plane, body: bytes, target: str) -> None:
    before = await plane.ok("GET", "/files")
    await refused(plane, "POST", "/files", 400, "InvalidRequest", target, content=body, headers=BOUNDARY)
    await refused(plane, "POST", "/files", 400, "InvalidRequest", target, content=body, headers={"content-type": "x"})
    assert await plane.ok("GET", "/files") == before


async def test_addresses_and_methods_that_there_are_not_are_told(plane: Plane) -> None:
    await refused(plane, "GET", "/nowhere", 404, "NotFound", None)
    await refused(plane, "GET", "/code/other", 404, "NotFound", None)
    answer = await plane.ask("PUT", "/executions", json={})
    assert "POST" in problem_in(answer, 405, "MethodNotAllowed")
    assert answer.headers["allow"] == "POST"
    await refused(plane, "GET", "/executions/no-such", 404, "ExecutionNotFound", None)
    await refused(plane, "GET", f"/executions/{'f' * 32}", 404, "ExecutionNotFound", None)
    await refused(plane, "GET", "/executions/%00%FF", 404, "ExecutionNotFound", None)
    await refused(plane, "GET", "/listSessions", 400, "InvalidRequest", "skip", params={"skip": "-1"})


async def test_an_operation_id_that_no_header_should_have_is_refused(plane: Plane) -> None:
    for value in ("x" * 129, "spa ce"):
        options = {"json": {"code": "1"}, "headers": {"operation-id": value}}
        await refused(plane, "POST", "/executions", 400, "InvalidRequest", "operation-id", **options)


async def test_output_that_is_no_unicode_is_sent_all_the_same(plane: Plane) -> None:
    answer = await plane.execute(r"print('\ud800'); '\ud800'")
    assert answer["status"] == "Succeeded"
