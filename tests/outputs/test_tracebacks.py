"""Tracebacks and warnings as models and people read them."""

import pytest

from belljar.outputs.html import traceback_html
from belljar.outputs.tracebacks import short_traceback, short_warnings, without_cell_file

HEADING = "KeyError                                  Traceback (most recent call last)"
SITE = "/srv/belljar/environments/default-1/lib/python3.11/site-packages"


def frames(count: int) -> list[str]:
    return [
        line
        for number in range(count)
        for line in (
            f"File {SITE}/lib/file{number}.py:{number}, in call(self, key)",
            f"--> {number} code",
            "    2 more",
        )
    ]


def test_each_frame_is_one_line_without_the_servers_folders():
    shown = short_traceback(
        [
            "-" * 75,
            HEADING,
            "Cell In[2], line 3",
            "      1 import pandas as pd",
            "      2 ",
            "----> 3 f(df)",
            "",
            "Cell In[1], line 2, in f(frame)",
            "      1 def f(frame):",
            "----> 2     return frame['town']",
            "",
            f"File {SITE}/pandas/core/frame.py:4330, in DataFrame.__getitem__(self, key)",
            "   4329     return self._getitem_multilevel(key)",
            "-> 4330 indexer = self.columns.get_loc(key)",
            "   (...)   4332     more",
            "File /usr/lib/python3.11/json/decoder.py:337, in JSONDecoder.decode(self, s, _w)",
            "    336 ",
            "--> 337     obj, end = self.raw_decode(s)",
            "File /mnt/data/helper.py:7, in help_out(x)",
            "      6 def help_out(x):",
            "----> 7     return x / 0",
            "",
            "KeyError: 'town'",
        ]
    )
    assert shown == [
        "Cell In[2], line 3: f(df)",
        "Cell In[1], line 2, in f: return frame['town']",
        "pandas/core/frame.py:4330, in DataFrame.__getitem__",
        "json/decoder.py:337, in JSONDecoder.decode",
        "/mnt/data/helper.py:7, in help_out: return x / 0",
        "KeyError: 'town'",
    ]


def test_frames_of_ours_are_hidden_wherever_belljar_is_installed():
    shown = short_traceback(
        [
            "Cell In[8], line 1",
            "----> 1 name = input('Name? ')",
            "    [... skipping hidden 1 frame]",
            "",
            "File /tmp/clone/src/belljar/inside/runner/host_link.py:99, in HostLink._answer_to(self, question)",
            "--> 99     raise EOFError(NO_INPUT)",
            "",
            "EOFError: input() has nobody to ask here",
        ]
    )
    assert shown == ["Cell In[8], line 1: name = input('Name? ')", "EOFError: input() has nobody to ask here"]


def test_of_many_library_frames_the_first_and_the_last_are_shown():
    shown = short_traceback(["Cell In[1], line 1", "----> 1 go()", *frames(20), "ValueError: no"])
    assert shown == [
        "Cell In[1], line 1: go()",
        "lib/file0.py:0, in call",
        "... 16 more library frames ...",
        "lib/file17.py:17, in call",
        "lib/file18.py:18, in call",
        "lib/file19.py:19, in call",
        "ValueError: no",
    ]
    assert len(short_traceback(frames(5))) == 5


def test_causes_within_libraries_are_told_in_their_words_and_once():
    link = "The above exception was the direct cause of the following exception:"
    cell = ["Cell In[1], line 1", "----> 1 go()"]
    assert short_traceback([*frames(2), "gaierror: unknown", "", link, "", *cell, "ConnectionError: no way"]) == [
        "gaierror: unknown",
        "which caused:",
        "Cell In[1], line 1: go()",
        "ConnectionError: no way",
    ]
    assert short_traceback([*frames(2), "KeyError: 'x'", "", link, *cell, "KeyError: 'x'"]) == [
        "Cell In[1], line 1: go()",
        "KeyError: 'x'",
    ]
    during = "During handling of the above exception, another exception occurred:"
    assert short_traceback([*cell, "ValueError: a", "", during, "", *cell, "KeyError: b"]) == [
        "Cell In[1], line 1: go()",
        "ValueError: a",
        "and while that was handled:",
        "Cell In[1], line 1: go()",
        "KeyError: b",
    ]


def test_what_has_another_form_stays():
    syntax = ["  Cell In[17], line 1", "    for i in range(3)", "                     ^", "SyntaxError: expected ':'"]
    assert short_traceback(syntax) == syntax
    message = ["Cell In[1], line 1", "----> 1 go()", "ValueError: far too", "long, 3 lines", "", "2 apart"]
    assert short_traceback(message) == [
        "Cell In[1], line 1: go()",
        "ValueError: far too",
        "long, 3 lines",
        "",
        "2 apart",
    ]
    assert short_traceback([]) == []


def test_a_warning_names_the_cell_or_the_librarys_file():
    said = f"<ipython-input-19-99576f97640f>:4: UserWarning: old\n{SITE}/lib/a.py:3: FutureWarning: later\nx\n"
    assert short_warnings(said) == "Cell In[19], line 4: UserWarning: old\nlib/a.py:3: FutureWarning: later\nx\n"
    assert short_warnings(f"{SITE}/pandas/__init__.py\n") == f"{SITE}/pandas/__init__.py\n", "what code prints stays"
    assert without_cell_file("SyntaxError: no (<ipython-input-17-ce34593446bc>, line 1)") == "SyntaxError: no"


# As people read them


def test_a_page_shows_the_message_first_then_the_cells_lines_and_libraries_in_one_line_each():
    html = traceback_html(
        [
            "-" * 75,
            HEADING,
            "Cell In[2], line 3",
            "      1 import pandas as pd",
            "----> 3 f(df)",
            "",
            f"File {SITE}/pandas/core/frame.py:4330, in DataFrame.__getitem__(self, key)",
            "-> 4330 indexer = self.columns.get_loc(key)",
            "",
            "KeyError: 'town<b>'",
        ]
    )
    seen, _, whole = html.partition("<details>")
    assert seen.index("KeyError: &#x27;town&lt;b&gt;&#x27;") < seen.index("Cell In[2], line 3")
    assert "<mark>----&gt; 3 f(df)\n</mark>" in seen
    assert '<li class="library">pandas/core/frame.py:4330, in DataFrame.__getitem__</li>' in seen
    assert "indexer = self.columns" not in seen
    assert "indexer = self.columns" in whole


def test_a_page_shows_what_caused_an_exception_after_it():
    html = traceback_html(
        [
            "Cell In[1], line 2",
            "----> 2     1/0",
            "",
            "ZeroDivisionError: division by zero",
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            "Cell In[1], line 4",
            "----> 4     raise RuntimeError('no') from error",
            "",
            "RuntimeError: no",
        ]
    )
    assert html.index("RuntimeError: no") < html.index("It was caused by <strong>ZeroDivisionError: division by zero")


def test_a_page_shows_a_syntax_errors_words_before_its_line():
    html = traceback_html(["  Cell In[3], line 1", "    x = = 1", "        ^", "SyntaxError: invalid syntax"])
    assert html.index("SyntaxError: invalid syntax") < html.index("x = = 1")
    assert "<details>" not in html


@pytest.mark.parametrize("lines", [[], [""], ["", " "], ["\x1b[31m<script>"], ["Cell In[1], line 1"] * 5_000])
def test_a_page_of_lines_that_are_no_traceback_is_bounded_and_escaped(lines: list[str]):
    html = traceback_html(lines)
    assert '<p class="raised">' in html
    assert "<script>" not in html
    assert html.partition("<details>")[0].count("<li>") <= 40


def test_frames_of_long_files_have_shorter_arrows_and_are_folded_all_the_same():
    lines = [HEADING, "Cell In[1], line 1", "----> 1 f()"]
    for arrow in ("> 13788", ">137880", "1378800"):
        lines += [
            f"File {SITE}/pandas/core/frame.py:{arrow.strip('> ')}, in DataFrame.groupby(self)",
            f"{arrow}     return 1",
        ]
    lines += ["  13789         obj=self,", "", "KeyError: 'x'"]
    assert short_traceback(lines)[-1] == "KeyError: 'x'"
    assert len(short_traceback(lines)) == 5
    assert traceback_html(lines).startswith('<p class="raised"><strong>KeyError: &#x27;x&#x27;</strong></p>')
