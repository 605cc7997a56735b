"""The notebook that a client gets is no larger than one answer can carry."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import TooLarge
from belljar.journal.journal import ExecutionRecord, open_journal
from belljar.models import OutputEvent
from belljar.sessions import history
from belljar.sessions.history import read_notebook

pytestmark = pytest.mark.anyio  # the journal wants a loop


def keep(folder: Path, *events: OutputEvent, cells: int = 1, code: str = "code") -> None:
    """Executions of a session that all say the same."""
    with open_journal(folder / "journal.sqlite") as journal:
        for number in range(cells):
            journal.submit(ExecutionRecord(f"{number}", "session", "local", code, None), time.time())
            for event in events:
                journal.append(f"{number}", event)


def read(folder: Path, display: bytes | None = None) -> list[Any]:
    """The cells of the notebook, with that behind every URI."""
    return json.loads(read_notebook(folder, "session", lambda uri: display))["cells"]


async def test_cells_share_what_text_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "TEXT_CHARS", 10_000)
    keep(tmp_path, OutputEvent(sequence=1, kind="stdout", text="x" * 9_000), cells=10)
    said = ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in read(tmp_path)]
    assert len(said) == 10
    assert all(900 <= text.count("x") <= 1_100 for text in said)
    assert all("characters left out here]" in text for text in said)


async def test_what_a_caller_had_installed_is_a_cell_where_it_was_installed(tmp_path: Path) -> None:
    with open_journal(tmp_path / "journal.sqlite") as journal:
        journal.record_install("session", "%pip install first")
        for number in range(2):
            journal.submit(ExecutionRecord(f"{number}", "session", "local", f"code {number}", None), time.time())
            journal.start(f"{number}")
            journal.record_install("session", f"%pip install 'after>={number}'")
        journal.record_install("another", "%pip install nothing")
    cells = read(tmp_path)
    assert ["".join(cell["source"]) for cell in cells] == [
        "%pip install first",
        "code 0",
        "%pip install 'after>=0'",
        "code 1",
        "%pip install 'after>=1'",
    ]
    assert [cell["id"] for cell in cells[::2]] == ["install-1", "install-3", "install-5"]
    with open_journal(tmp_path / "journal.sqlite") as journal:
        journal.forget_session("session")
        assert list(journal.installs("session")) == []


async def test_one_cell_has_all_its_text_where_there_is_room(tmp_path: Path) -> None:
    keep(tmp_path, OutputEvent(sequence=1, kind="stdout", text="x" * 900_000))
    (cell,) = read(tmp_path)
    assert "".join(cell["outputs"][0]["text"]) == "x" * 900_000


@pytest.mark.parametrize("what", ["code", "file", "inline"])
async def test_more_code_and_displays_than_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 10_000)
    stored = {"display": {"mime": "image/png", "uri": "execution://0/displays/1.png"}}
    inline = {"display": {"mime": "text/html", "text": "x" * 2_000}}
    event = OutputEvent(sequence=1, kind="display", text="", data=stored if what == "file" else inline)
    code = "x" * (2_000 if what == "code" else 10)
    keep(tmp_path, *([] if what == "code" else [event]), cells=4, code=code)
    assert len(read(tmp_path, b"x" * 2_000)) == 4
    keep_more = ExecutionRecord("more", "session", "local", code * 2, None)
    with open_journal(tmp_path / "journal.sqlite") as journal:
        journal.submit(keep_more, time.time())
        journal.append("more", event)
        journal.append("more", event.model_copy(update={"sequence": 2}))
    with pytest.raises(TooLarge, match="the code and displays of session session are over 10,000 bytes"):
        read(tmp_path, b"x" * 2_000)
