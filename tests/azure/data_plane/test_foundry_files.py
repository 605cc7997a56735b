import pytest
from data_plane import OLD, Plane, problem_in

from belljar.runtime import Runtime
from waiting import until

pytestmark = pytest.mark.anyio


def names(listing: dict) -> list[tuple[str, str, str]]:
    return [(entry["directory"], entry["name"], entry["type"]) for entry in listing["value"]]


async def test_a_file_goes_up_is_listed_comes_down_and_is_deleted(plane: Plane) -> None:
    one = plane.other()
    entry = await one.upload("table.csv", b"a,b\n1,2\n")
    assert entry.pop("lastModifiedAt").endswith("Z")
    expected = {"name": "table.csv", "type": "file", "contentType": "text/csv", "sizeInBytes": 8}
    assert entry == {**expected, "directory": "/mnt/data"}
    assert names(await one.ok("GET", "/files")) == [("/mnt/data", "table.csv", "file")]
    assert (await one.ok("GET", "/files/table.csv"))["sizeInBytes"] == 8
    assert (await one.ask("GET", "/files/table.csv/content")).content == b"a,b\n1,2\n"
    assert (await one.execute("open('/mnt/data/table.csv').read()"))["result"]["executionResult"] == "a,b\n1,2\n"
    assert (await one.upload("table.csv", b"new"))["sizeInBytes"] == 3
    assert (await one.ask("DELETE", "/files/table.csv")).status_code == 204
    problem_in(await one.ask("GET", "/files/table.csv/content"), 404, "SessionFileNotFound", "name")
    problem_in(await one.ask("DELETE", "/files/table.csv"), 404, "SessionFileNotFound", "name")


async def test_paths_are_relative_or_below_mnt_data(plane: Plane) -> None:
    one = plane.other()
    await one.upload("x.csv", b"1", folder="/mnt/data/sub")
    await one.upload("sub/deep/y.csv", b"22")
    await one.upload("/mnt/data/z.csv", b"333")
    assert names(await one.ok("GET", "/files")) == [("/mnt/data", "sub", "directory"), ("/mnt/data", "z.csv", "file")]
    everything = await one.ok("GET", "/files", params={"recursive": "true"})
    assert names(everything) == [
        ("/mnt/data", "sub", "directory"),
        ("/mnt/data", "z.csv", "file"),
        ("/mnt/data/sub", "deep", "directory"),
        ("/mnt/data/sub", "x.csv", "file"),
        ("/mnt/data/sub/deep", "y.csv", "file"),
    ]
    below = await one.ok("GET", "/files", params={"path": "sub"})
    assert names(below) == [("/mnt/data/sub", "deep", "directory"), ("/mnt/data/sub", "x.csv", "file")]
    for path, query in [
        ("/files/sub/x.csv/content", {}),
        ("/files/sub%2Fx.csv/content", {}),
        ("/files/x.csv/content", {"path": "/mnt/data/sub"}),
        ("/files/x.csv/content", {"path": "sub"}),
        ("/files//mnt/data/sub/x.csv/content", {}),
        ("/files/mnt/data/sub/x.csv/content", {}),
        ("/files/%2Fmnt%2Fdata%2Fsub%2Fx.csv/content", {}),
    ]:
        answer = await one.ask("GET", path, params=query)
        assert answer.content == b"1", path


async def test_old_versions_list_all_files_with_the_names_they_were_sent_with(plane: Plane) -> None:
    old = plane.other(version=OLD)
    sent = ["x.csv", "sub/x.csv", "/mnt/data/y z.csv", 'quoted"ä.txt']
    for name in sent:
        answer = await old.upload(name, b"12345", path="/files/upload")
        (value,) = answer["value"]
        properties = value["properties"]
        assert properties["lastModifiedTime"].endswith("Z")
        assert (answer["$id"], value["$id"], properties["$id"], properties["size"]) == ("1", "2", "3", 5)
        assert properties["filename"] == name.removeprefix("/mnt/data/")
    listed = await old.ok("GET", "/files")
    found = {entry["properties"]["filename"] for entry in listed["value"]}
    assert found == {name.removeprefix("/mnt/data/") for name in sent}
    assert (await old.ok("GET", "/files/sub/x.csv"))["value"][0]["properties"]["filename"] == "sub/x.csv"
    for path in ("/files/content/sub/x.csv", "/files/content/sub%2Fx.csv", "/files/content//mnt/data/y%20z.csv"):
        assert (await old.ask("GET", path)).content == b"12345", path
    assert (await old.ask("DELETE", "/files/sub/x.csv")).status_code == 204
    problem_in(await old.ask("GET", "/files/content/sub/x.csv"), 404, "SessionFileNotFound", "name")


async def test_a_file_may_be_called_content(plane: Plane) -> None:
    one = plane.other()
    await one.upload("sub/content", b"1")
    assert (await one.ok("GET", "/files/sub/content"))["name"] == "content"
    assert (await one.ask("GET", "/files/sub/content/content")).content == b"1"


async def test_a_multipart_body_is_known_by_its_first_line(plane: Plane) -> None:
    head = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
    body = head + b"content\r\n--edge--\r\n"
    headers = {"content-type": "application/json"}
    answer = await plane.ask("POST", "/files", content=body, headers=headers)
    assert answer.json()["sizeInBytes"] == 7
    odd = (
        b"--edge\r\nContent-Disposition: form-data; name=\"file\"; filename*=utf-8''%C3%A4.txt\r\n\r\n1\r\n--edge--\r\n"
    )
    assert (await plane.ask("POST", "/files", content=odd, headers=headers)).json()["name"] == "ä.txt"


async def test_an_upload_that_stops_half_way_leaves_nothing(plane: Plane, runtime: Runtime) -> None:
    one = plane.other()
    await one.execute("1")
    (session,) = [each for each in runtime.sessions.all() if each.id == _newest(runtime)]

    async def body():
        yield b'--edge\r\nContent-Disposition: form-data; name="file"; filename="half.bin"\r\n\r\n'
        yield b"x" * 3_000_000
        raise ConnectionError("the client goes away")

    headers = {"content-type": "multipart/form-data; boundary=edge"}
    with pytest.raises(ConnectionError):
        await one.ask("POST", "/files", content=body(), headers=headers)
    await until(lambda: not session._uses)
    assert (await one.ok("GET", "/files"))["value"] == []
    left = [path for path in session.folders.root.rglob("*") if path.is_file() and path.stat().st_size > 1_000_000]
    assert left == []


def _newest(runtime: Runtime) -> str:
    return max(runtime.sessions.all(), key=lambda session: session.lease.created_at).id


async def test_uploads_over_the_limit_are_refused_and_the_old_file_stays(plane: Plane) -> None:
    one = plane.other()
    await one.upload("kept.bin", b"old")
    answer = await one.ask("POST", "/files", files={"file": ("kept.bin", b"x" * 8_000_001)})
    problem_in(answer, 413, "FileTooLarge", "file")
    answer = await one.ask("POST", "/files", files={"file": ("kept.bin", b"x" * 20_000_000)})
    problem_in(answer, 413, "FileTooLarge", "file")
    assert (await one.ask("GET", "/files/kept.bin/content")).content == b"old"


async def test_a_long_list_goes_on_at_its_next_link(plane: Plane) -> None:
    one = plane.other()
    await one.execute("for number in range(1500): open(f'{number:04}.txt', 'w').close()")
    for query in ({}, {"recursive": "true"}):
        first = await one.ok("GET", "/files", params=query)
        assert len(first["value"]) == 1000
        rest = (await one.client.get(first["nextLink"])).json()
        assert [entry["name"] for entry in rest["value"]] == [f"{number:04}.txt" for number in range(1000, 1500)]
        assert rest["nextLink"] is None
