"""Files as tables: which texts are, what is shown of them, and hostile ones."""

import ast

import pytest

from belljar.console.table_files import reading_code, table_preview
from growth import TIMES, growth


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_regular_text_is_a_table(delimiter: str) -> None:
    text = "name,people\nOslo,709037\nBern,\n<b>Rome</b>,2748109\n".replace(",", delimiter)
    shown = table_preview("towns.csv", text, is_whole=True)
    assert shown is not None
    assert (shown.read, shown.shown, shown.width) == (3, 3, 2)
    assert '<td class="num">709,037</td>' in shown.rows
    assert "&lt;b&gt;Rome&lt;/b&gt;" in shown.rows
    assert "1 missing" in shown.columns


def test_the_beginning_of_a_long_file_leaves_out_the_line_that_is_cut() -> None:
    text = "a,b\n" + "1,2\n" * 1_000 + "1,200"
    shown = table_preview("long.csv", text, is_whole=False)
    assert shown is not None
    assert (shown.read, shown.shown) == (1_000, 200)
    assert shown.rows.count("<tr>") == 201


def test_two_thousand_columns_are_shown_in_part() -> None:
    row = ",".join(map(str, range(2_000)))
    shown = table_preview("wide.csv", f"{row}\n{row}\n", is_whole=True)
    assert shown is not None
    assert (shown.width, shown.rows.count('<td class="num">')) == (2_000, shown.wide)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("notes.txt", "a,b\n1,2\n"),
        ("empty.csv", ""),
        ("one.csv", "a,b"),
        ("ragged.csv", "a,b\n1\n2,3,4\n5\n"),
        ("long.csv", 'a,b\n"' + "x" * 200_000),
        ("null.csv", "a,b\n\0\n"),
    ],
)
def test_any_other_text_stays_text(name: str, text: str) -> None:
    assert table_preview(name, text, is_whole=True) is None


@pytest.mark.parametrize("part", ['"', ",", "1,2\n", '"a', '""', "\r"])
def test_time_to_read_a_file_grows_with_its_length(part: str) -> None:
    assert (
        growth(lambda text: table_preview("x.csv", text, is_whole=True), lambda count: "a,b\n" + part * count) <= TIMES
    )


def test_what_needs_a_library_is_read_by_a_cell() -> None:
    code = reading_code('it\'s a "trap"\n.parquet')
    call = ast.parse(code).body[-1]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert ast.literal_eval(call.value.args[0]) == 'it\'s a "trap"\n.parquet'
    assert reading_code("notes.txt") == ""
