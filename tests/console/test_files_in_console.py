"""Files of a session in the console: renamed, and all of them as one archive, whatever they are called."""

import io
import zipfile
from collections.abc import AsyncGenerator

import pytest
from calls import FORKS
from consoles import Place, opened_place

from belljar.console import archive
from belljar.engine.contract import Access
from belljar.engine.many import servers_of
from belljar.environments import Environment
from belljar.errors import FileMissing, InvalidPath, SessionNotFound
from growth import TIMES, growth

pytestmark = pytest.mark.anyio

OPERATOR = Access("local", is_operator=True, name="olga")
HOSTILE = r"""
import os
os.makedirs('a/b', exist_ok=True)
files = {'one.txt': '1', 'a/b/two.txt': '22', 'c:\\evil\\x': '3', 'c:_evil_x': '4', '...': '5', 'l\nf': '6'}
for name, text in files.items():
    open(name, 'w').write(text)
os.symlink('/etc/passwd', 'link')
"""


@pytest.fixture(scope="module")
async def place(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Place]:
    async with opened_place(default_environment, tmp_path_factory.mktemp("files"), **FORKS) as opened:
        yield opened


async def test_all_files_come_as_one_archive_whose_names_lead_nowhere_else(place: Place) -> None:
    ran = await place.agent.execute(HOSTILE)
    own = f"/console/sessions/{ran.session_id}"
    async with place.operator() as browser:
        answer = await browser.get(f"{own}/archive")
        assert answer.headers["content-type"] == "application/zip"
        assert "attachment" in answer.headers["content-disposition"]
        with zipfile.ZipFile(io.BytesIO(answer.content)) as found:
            assert found.testzip() is None
            told = {name: found.read(name) for name in found.namelist()}
        assert told["one.txt"] == b"1"
        assert told["a/b/two.txt"] == b"22"
        assert sorted(told.values()) == [b"1", b"22", b"3", b"4", b"5", b"6"]
        for name in told:
            assert not {"\\", ":", "\n", ".."} & {*name, *name.split("/")}, name
            assert all(part.strip(". ") for part in name.split("/"))
        answer = await browser.get(f"{own}/archive?path=a")
        with zipfile.ZipFile(io.BytesIO(answer.content)) as found:
            assert found.namelist() == ["a/b/two.txt"]
        assert (await browser.get(f"{own}/archive?path=nowhere")).status_code == 404
        page = (await browser.get(f"{own}/files?path=a/b")).text
        assert "Download this folder as .zip" in page


def test_names_that_become_one_are_numbered_in_a_time_that_grows_with_their_number() -> None:
    def named(text: str) -> None:
        taken: dict[str, int] = {}
        names = [archive._safe_name(each, taken) for each in text.split("\n")]
        assert len({each.lower() for each in names}) == len(names)

    assert growth(named, lambda count: "a:\nA*\na_~2\n" * (count // 10), 20_000) <= TIMES


async def test_a_folder_that_is_too_large_is_refused_before_anything_is_sent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = await place.agent.execute("for n in range(4): open(f'{n}', 'w').write('x')")
    monkeypatch.setattr(archive, "MAX_FILES", 3)
    async with place.operator() as browser:
        answer = await browser.get(f"/console/sessions/{ran.session_id}/archive")
        assert (answer.status_code, "Download a folder in it" in answer.text) == (413, True)


async def test_a_file_is_renamed_and_never_over_another(place: Place) -> None:
    ran = await place.agent.execute("for name in ('a', 'b', 'c'): open(name, 'w').write(name)")
    for number, engine in enumerate(
        (place.runtime.late_engine.get(), servers_of(place.runtime.settings.data_directory))
    ):
        name = "a" if number == 0 else "c"
        await engine.rename_file(OPERATOR, ran.session_id, name, f"new/{name}.txt")
        assert (await engine.read_part(OPERATOR, ran.session_id, f"new/{name}.txt", 0, 10)).content == name.encode()
        with pytest.raises(FileMissing):
            await engine.rename_file(OPERATOR, ran.session_id, name, "d")
        with pytest.raises(InvalidPath, match="is there already"):
            await engine.rename_file(OPERATOR, ran.session_id, f"new/{name}.txt", "b")
        with pytest.raises(InvalidPath):
            await engine.rename_file(OPERATOR, ran.session_id, "b", "../b")
        with pytest.raises(SessionNotFound):
            await engine.rename_file(Access("key:stranger"), ran.session_id, "b", "d")
    async with place.operator() as browser:
        sent = {"name": "b", "to": "new/b"}
        answer = await browser.post(f"/console/sessions/{ran.session_id}/rename-file", data=sent)
        assert answer.headers["location"].endswith("/files?done=file-renamed&path=new")
        told = await place.agent.execute("1", ran.session_id)
        assert "renamed 'b' to 'new/b'" in " ".join(one.text for one in told.notices)
