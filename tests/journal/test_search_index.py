"""The index of cells' code and output: what is found, what never is, and what becomes of it with the journal."""

import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from test_journal import finish
from test_retention import result_of

from belljar.errors import EngineError, InvalidArgument
from belljar.journal import search_index
from belljar.journal.journal import ExecutionRecord, Journal, open_journal
from belljar.journal.retention import Trimmer
from belljar.journal.search_index import FoundRow, TextQuery, forget_session, has_index, owners, search
from belljar.journal.session_records import SessionRecords
from belljar.models import OutputEvent

pytestmark = pytest.mark.anyio

RUN = "1-run"
OWNER = "somebody"


@pytest.fixture
async def journal(anyio_backend: str, tmp_path: Path) -> AsyncIterator[Journal]:
    with open_journal(tmp_path / "journal.sqlite") as journal:
        SessionRecords(journal, RUN).enter("session", OWNER, "default", "", "live")
        yield journal


def ran(
    journal: Journal, execution_id: str, code: str, *output: str, session: str = "session", owner: str = OWNER
) -> None:
    journal.submit(ExecutionRecord(execution_id, session, owner, code, None), time.time())
    for number, text in enumerate(output, 1):
        journal.append(execution_id, OutputEvent(sequence=number, kind="stdout", text=text))
    finish(journal, execution_id, len(output))


def rows(journal: Journal, text: str, owner: str = OWNER, **query: object) -> list[FoundRow]:
    journal.commit()
    wanted = TextQuery(text, RUN, **query)  # pyright: ignore[reportArgumentType]
    return search(journal.path, owner, wanted, time.monotonic() + 60)[0]


def found(journal: Journal, text: str, owner: str = OWNER) -> list[str]:
    return [row.execution_id for row in rows(journal, text, owner)]


def excerpt(row: FoundRow) -> str:
    return "".join(f"[{text}]" if is_match else text for text, is_match in (*row.code, *row.output))


async def test_words_of_code_and_output_are_found_in_any_case_by_their_beginning(journal: Journal) -> None:
    ran(journal, "first", "table = read_csv('sales.csv')", "\x1b[31m1,204 rows\x1b[0m\n")
    ran(journal, "second", "table['región']", "KeyError: 'región'\n")
    assert found(journal, "table") == ["second", "first"]
    assert found(journal, "READ_C") == found(journal, "sales.csv") == found(journal, "1,204") == ["first"]
    assert found(journal, "keyerr") == found(journal, "region KEYERROR") == ["second"]
    assert found(journal, "table rows") == ["first"]
    assert found(journal, '"table region"') == ["second"]
    assert found(journal, '"region table"') == []
    (row,) = rows(journal, "rows")
    assert (excerpt(row), row.code) == ("1,204 [rows]\n", [])


async def test_what_a_running_cell_prints_is_found_as_it_comes(journal: Journal) -> None:
    journal.submit(ExecutionRecord("running", "session", OWNER, "train()", None), time.time())
    assert found(journal, "train") == ["running"]
    journal.append("running", OutputEvent(sequence=1, kind="stdout", text="epoch 1\n"))
    assert found(journal, "epoch") == ["running"]
    finish(journal, "running", 1)
    assert found(journal, "epoch") == ["running"]


async def test_an_owner_finds_nothing_of_another_and_reads_nothing_of_theirs(journal: Journal) -> None:
    records = SessionRecords(journal, RUN)
    records.enter("theirs", "another", "default", "", "live")
    ran(journal, "mine", "shared = 1")
    ran(journal, "foreign", "shared = secret_word", session="theirs", owner="another")
    assert found(journal, "shared") == ["mine"]
    assert found(journal, "secret_word") == []
    assert not has_index(journal.path, "another")
    assert found(journal, "shared", "another") == ["foreign"]
    assert owners(journal.path) == ["another", OWNER]
    content = b"".join(path.read_bytes() for path in search_index._file(journal.path, OWNER).parent.glob("*"))  # pyright: ignore[reportPrivateUsage]
    assert b"secret_word" in content
    mine = search_index._file(journal.path, OWNER)  # pyright: ignore[reportPrivateUsage]
    for path in mine.parent.glob(f"{mine.name}*"):
        assert b"secret_word" not in path.read_bytes()


async def test_sessions_that_are_live_at_another_server_are_told_by_that_one(journal: Journal) -> None:
    SessionRecords(journal, "2-other").enter("elsewhere", OWNER, "default", "", "live")
    ran(journal, "there", "x = 1", session="elsewhere")
    assert found(journal, "x") == []
    journal.commit()
    assert search(journal.path, OWNER, TextQuery("x", "2-other"), time.monotonic() + 60)[0] != []


async def test_an_ended_session_is_not_found_from_then_on_and_its_texts_are_deleted(journal: Journal) -> None:
    ran(journal, "cell", "forgotten = 1", "forgotten too\n")
    assert found(journal, "forgotten") == ["cell"]
    journal.forget_session("session")
    SessionRecords(journal, RUN).record_end("session", "ended")
    assert found(journal, "forgotten") == []
    SessionRecords(journal, RUN).enter("other", OWNER, "default", "", "live")
    ran(journal, "later", "forgotten = 2", session="other")
    assert found(journal, "forgotten") == ["later"]
    forget_session(journal.path, OWNER, "other")
    file = search_index._file(journal.path, OWNER)  # pyright: ignore[reportPrivateUsage]
    with closing(sqlite3.connect(file)) as index:
        assert index.execute("SELECT count(*) FROM texts").fetchone() == (0,)
    # The journal still has it, and a search reads it in anew.
    assert found(journal, "forgotten") == ["later"]


async def test_output_and_code_that_the_journal_dropped_are_not_found(journal: Journal, tmp_path: Path) -> None:
    journal.submit(ExecutionRecord("large", "session", OWNER, f"loud = 1 # {'x ' * 1_000}", None), time.time())
    for number in range(1, 300):
        journal.append("large", OutputEvent(sequence=number, kind="stdout", text=f"noise {'y' * 64_000}\n"))
    journal.finish(result_of("large").model_copy(update={"sequence": 299}), output_bytes=300 * 64_000)
    assert found(journal, "loud") == found(journal, "noise") == ["large"]
    journal.commit()
    assert Trimmer(journal.path, tmp_path / "sessions", 16).trim() == 1
    assert found(journal, "loud") == ["large"]
    assert found(journal, "noise") == []
    ran(journal, "long", f"verbose = '{'w ' * 9_000_000}'")
    assert found(journal, "verbose") == ["long"]
    assert Trimmer(journal.path, tmp_path / "sessions", 16).trim() == 0
    assert found(journal, "verbose") == found(journal, "loud") == []


async def test_undone_cells_are_found_and_said_to_be_undone(journal: Journal) -> None:
    ran(journal, "kept", "value = 1")
    ran(journal, "undone", "value = 2")
    journal.undo(["undone"])
    assert [(row.execution_id, row.is_undone) for row in rows(journal, "value")] == [("undone", True), ("kept", False)]


async def test_pages_go_on_where_the_last_ended(journal: Journal) -> None:
    for number in range(7):
        ran(journal, f"cell{number}", "again = 1")
    first = rows(journal, "again", limit=3)
    second = rows(journal, "again", limit=3, before=first[-1].place)
    third = rows(journal, "again", limit=3, before=second[-1].place)
    assert [row.execution_id for row in (*first, *second, *third)] == [f"cell{number}" for number in reversed(range(7))]


async def test_nothing_that_is_typed_is_syntax(journal: Journal) -> None:
    ran(journal, "cell", "a c and or not near code a drop table texts")
    for text in (
        '"unclosed',
        "NEAR(a b)",
        "％a b c d",
        "a\u202eb c",
        "a\0zz",
        "a NOT zz",
        "zz OR a",
        "a -zz",
    ):
        assert found(journal, text) == [], text
    for text in (
        "a AND",
        "OR",
        "code:a",
        "-a",
        "a*",
        "^a",
        "{a}: c",
        "a\0c",
        "\ud800a",
        "'--a",
        "; DROP TABLE texts",
        "a " * 500,
    ):
        assert found(journal, text) == ["cell"], text
    for text in ("", '"', '""', "()", "\0", '" "', "*", "-" * 1_000):
        with pytest.raises(InvalidArgument, match="no word"):
            found(journal, text)


async def test_a_text_that_is_too_long_is_refused_in_words(journal: Journal) -> None:
    with pytest.raises(InvalidArgument, match="10,240 characters"):
        found(journal, "x" * 10_240)


async def test_an_excerpt_of_words_without_end_is_short_and_its_marks_cannot_be_forged(journal: Journal) -> None:
    ran(journal, "cell", "x" * 200_000, f"[found] \x02 {'y' * 1_000_000} needle {'z' * 1_000_000}\n" * 2, "needle")
    (row,) = rows(journal, "needle")
    assert [text for text, is_match in row.output if is_match] == ["needle"]
    assert len(excerpt(row)) < 1_500
    ran(journal, "other", "print('<script>alert(1)</script> needle')")
    assert "<script>" in excerpt(rows(journal, "needle")[0])  # as it stands: pages escape it


async def test_a_word_that_a_cell_has_very_often_is_found_in_linear_time(journal: Journal) -> None:
    for number in range(5):
        ran(journal, f"cell{number}", f"zeros = '{'0 ' * 20_000}'", "0. " * 30_000, "é0 " * 30_000)
    ran(journal, "last", "print(0)")
    rows(journal, "print")
    before = time.process_time()
    assert [row.execution_id for row in rows(journal, "0 zero É")] == [f"cell{number}" for number in range(5)][::-1]
    (row,) = rows(journal, "print 0")
    assert excerpt(row) == "[print]([0])"
    assert time.process_time() - before < 5


async def test_what_is_looked_for_is_marked_in_any_script_and_with_what_stands_around_it(journal: Journal) -> None:
    ran(journal, "cell", "x" * 100 + " Größe_Región = '각설탕'", "ÉTÉ, été; e te\n")
    assert excerpt(rows(journal, "region")[0]) == "…" + "x" * 73 + " Größe_[Región] = '각설탕'"
    assert excerpt(rows(journal, "각")[0]).endswith("Größe_Región = '[각설탕]'")
    assert excerpt(rows(journal, "ete")[0]) == "[ÉTÉ], [été]; e te\n"
    assert excerpt(rows(journal, '"größe región" "e te"')[0]).count("[") == 2
    with pytest.raises(InvalidArgument, match="65 words"):
        rows(journal, " ".join(f"w{number}" for number in range(65)))


async def test_cells_of_a_session_that_left_and_came_back_are_found_though_their_places_are_earlier(
    journal: Journal,
) -> None:
    SessionRecords(journal, RUN).enter("other", OWNER, "default", "", "live")
    for number in range(9):
        ran(journal, f"other{number}", "x = 1", session="other")
    ran(journal, "first", "y = 1")
    assert found(journal, "y") == ["first"]
    for session in ("session", "other"):
        journal.forget_session(session)
    for name in ("first", "elsewhere", "again"):
        ran(journal, name, "y = 1")
    assert found(journal, "y") == ["again", "elsewhere", "first"]
    journal.commit()
    assert search(journal.path, OWNER, TextQuery("y", RUN), 0.0)[1] == 0


async def test_an_index_that_is_broken_or_gone_is_made_anew(journal: Journal) -> None:
    ran(journal, "cell", "lasting = 1")
    assert found(journal, "lasting") == ["cell"]
    file = search_index._file(journal.path, OWNER)  # pyright: ignore[reportPrivateUsage]
    for path in file.parent.glob("*"):
        path.unlink()
    assert found(journal, "lasting") == ["cell"]
    file.write_bytes(b"no database at all" * 1_000)
    assert found(journal, "lasting") == ["cell"]


@pytest.mark.parametrize(
    "altered",
    ["UPDATE texts_config SET v = 99 WHERE k = 'version'", "UPDATE texts_content SET c1 = CAST(x'ff41' AS TEXT)"],
)
async def test_an_index_whose_rows_were_altered_is_made_anew(journal: Journal, altered: str) -> None:
    ran(journal, "first", "alpha", "beta\n")
    assert found(journal, "beta") == ["first"]
    with closing(sqlite3.connect(next((journal.path.parent / "search").glob("*.sqlite")))) as index, index:
        index.execute(altered)
    assert found(journal, "beta") == ["first"]


async def test_what_takes_too_long_to_read_in_is_told_and_gone_on_with(journal: Journal) -> None:
    for number in range(250):
        ran(journal, f"cell{number}", "many = 1")
    journal.commit()
    unread = [search(journal.path, OWNER, TextQuery("many", RUN, limit=300), 0.0)[1] for _ in range(4)]
    assert unread == [150, 50, 0, 0]
    assert len(rows(journal, "many", limit=300)) == 250


async def test_without_full_text_search_in_sqlite_it_says_so(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_index, "_TABLES", search_index._TABLES.replace("fts5(", "fts5missing("))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(EngineError, match="has no FTS5"):
        found(journal, "anything")
    monkeypatch.undo()
    ran(journal, "cell", "anything")
    assert found(journal, "anything") == ["cell"]
