"""Tables that cells show as HTML: which pages are tables, how people write what is in them, and hostile ones."""

import re

import pytest

from belljar.inside.runner.columns import matcher, summary_of
from belljar.outputs.tables import kind_of, table_html, table_in, written
from growth import TIMES, growth

STYLE = "<style scoped>\n .dataframe tbody tr th {\n vertical-align: top;\n }\n</style>\n"


def frame(heads: list[str], rows: list[list[str]], note: str = "", style: str = STYLE) -> str:
    """What pandas shows of a frame."""
    head = "".join(f"<th>{name}</th>\n" for name in heads)
    body = "".join(
        f"<tr>\n<th>{label}</th>\n" + "".join(f"<td>{one}</td>\n" for one in rest) + "</tr>\n" for label, *rest in rows
    )
    return (
        f'<div>\n{style}<table border="1" class="dataframe">\n<thead>\n<tr style="text-align: right;">\n{head}</tr>\n'
        f"</thead>\n<tbody>\n{body}</tbody>\n</table>\n{note}</div>"
    )


def cells(html: str) -> list[tuple[str, str]]:
    return re.findall(r'<td class="([^"]*)">([^<]*)</td>', html)


def test_a_frame_is_written_as_people_do() -> None:
    page = frame(
        ["", "day", "sold", "id", "city"],
        [
            ["0", "2026-01-01 00:00:00", "12345.50", "70001", "Oslo"],
            ["1", "2026-01-02 00:00:00", "NaN", "70002", "None"],
        ],
        "<p>2 rows × 4 columns</p>\n",
    )
    html = table_html(table) if (table := table_in(page)) else ""
    assert cells(html) == [
        ("time", "2026-01-01"),
        ("num", "12,345.50"),
        ("num", "70001"),  # which names something, and counts nothing
        ("text", "Oslo"),
        ("time", "2026-01-02"),
        ("none num", "NaN"),
        ("num", "70002"),
        ("none text", "None"),
    ]
    assert "<p>2 rows × 4 columns</p>" in html
    assert '<b class="gaps">1 missing</b>' in html


def test_the_names_of_labels_share_the_row_of_the_columns() -> None:
    page = frame(["region", "East", "West"], [["2026-01", "1", "2"]])
    page = page.replace("</tr>\n</thead>", "</tr>\n<tr>\n<th>month</th>\n<th></th>\n<th></th>\n</tr>\n</thead>")
    table = table_in(page)
    assert table is not None
    assert [[head.text for head in row] for row in table.heads] == [["month / region", "East", "West"]]


def test_what_pandas_leaves_out_is_no_value() -> None:
    rows = [["0", "1", "...", "2"], ["...", "...", "...", "..."], ["9", "3", "...", "4"]]
    table = table_in(frame(["", "a", "...", "b"], rows))
    assert table is not None
    assert not table.is_plain
    html = table_html(table, can_sort=True)
    assert "in the rows that are shown" in html
    assert html.count("all 2 distinct") == 2
    assert "data-sort" not in html


def test_polars_tells_types_in_a_row_of_their_own() -> None:
    page = (
        "<div><style>\n.dataframe > thead > tr,\n.dataframe > tbody > tr {\n  text-align: right;\n}\n</style>\n"
        '<small>shape: (1, 2)</small><table border="1" class="dataframe"><thead><tr><th>a</th><th>b</th></tr>'
        "<tr><td>i64</td><td>str</td></tr></thead><tbody><tr><td>1</td><td>&quot;x&quot;</td></tr></tbody></table></div>"
    )
    table = table_in(page)
    assert table is not None
    assert (table.dtypes, table.rows[0].texts, table.note) == (["i64", "str"], ["1", "x"], "shape: (1, 2)")


@pytest.mark.parametrize(
    "page",
    [
        frame(["", "a"], [["0", "<a href='https://example.com'>1</a>"]]),
        frame(["", "a"], [["0", "<img src=x onerror=alert(1)>"]]),
        frame(["", "a"], [["0", "1"]], style="<style>#T_1 td {background-color: red}</style>"),
        frame(["", "a"], [["0", "1"]]).replace("<td>", '<td onclick="alert(1)">'),
        frame(["", "a"], [["0", "1"]]).replace("<td>", '<td style="position: fixed">'),
        frame(["", "a"], [["0", "1"], ["1"]]),
        frame(["", "a"], []),
        frame(["", "a"], [["0", "1"]]) + "<script>alert(1)</script>",
        frame(["", "a"], [["0", "1"]]) * 2,
        "<table class='dataframe'",
        "no table",
    ],
)
def test_a_page_with_anything_else_is_no_table(page: str) -> None:
    assert table_in(page) is None


def test_what_is_in_a_table_is_text() -> None:
    hostile = "&lt;script&gt;alert(1)&lt;/script&gt;\u202e"
    html = table_html(table) if (table := table_in(frame(["", hostile], [["0", hostile], ["1", hostile]]))) else ""
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;\N{REPLACEMENT CHARACTER}") == 5  # head, cells, columns


@pytest.mark.parametrize("part", ["<tr><th>0</th><td>1</td></tr>", "<td>", "<td ", "</tr>", "<style>", "&lt;", "x"])
def test_time_to_read_a_table_grows_with_its_length(part: str) -> None:
    def read(page: str) -> None:
        if (table := table_in(page)) is not None:
            table_html(table)

    start, end = frame(["", "a"], [["0", "1"]]).split("</tbody>")
    assert growth(read, lambda count: start + part * count + "</tbody>" + end, 65_536) <= TIMES


def test_numbers_have_the_decimals_that_they_need() -> None:
    assert written(["0.30000000000000004", "2", "nan", None, "1e-12"], "number") == [
        "0.30000",
        "2.00000",
        None,
        None,
        "1e-12",
    ]
    assert written(["3.0", "nan", "20000.0"], "number") == ["3", None, "20,000"]
    assert written(["−1.5", "2.25"], "number") == ["-1.50", "2.25"]
    assert written(["1999", "2026"], "number", "year") == ["1999", "2026"]
    assert written(["2026-01-01T08:00:00"], "time") == ["2026-01-01 08:00:00"]
    assert [kind_of(texts) for texts in (["1", "-2.5"], ["2026-01-01", "NaT"], ["True"], ["1", "x"], [])] == [
        "number", "time", "boolean", "text", "text",
    ]  # fmt: skip


def test_a_column_tells_what_it_holds() -> None:
    numbers = summary_of(["1", "2", "2", None, "nan", "12"], "number")
    assert numbers == {
        "count": 6, "missing": 2, "distinct": 3, "least": "1", "most": "12", "frequent": [],
        "bins": [1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    }  # fmt: skip
    assert summary_of(["a", "b", "a"], "text")["frequent"] == [{"text": "a", "count": 2}]
    assert summary_of(["inf", "1"], "number")["bins"] == []
    assert summary_of([], "time")["distinct"] == 0


@pytest.mark.parametrize(
    ("wanted", "kind", "fitting"),
    [
        ("os", "text", ["Oslo"]),
        ("= Rome", "text", ["Rome"]),
        ("=", "text", [None]),
        ("!=", "text", ["Oslo", "Rome"]),
        (">= 2", "number", []),
        (">= N", "text", ["Oslo", "Rome"]),
    ],
)
def test_rows_are_looked_for_by_a_part_or_a_comparison(wanted: str, kind: str, fitting: list[str | None]) -> None:
    fits = matcher(wanted, kind)
    assert [text for text in ("Oslo", "Rome", None) if fits(text)] == fitting
