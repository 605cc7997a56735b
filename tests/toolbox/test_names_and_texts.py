"""Whatever servers call things and say of them: names are Python's and no two alike, texts stay texts."""

import ast
import inspect
import keyword

from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.toolbox.names import assigned
from belljar.toolbox.server_text import docstring, one_line, plain_arguments, suggestion, visible

# Mostly what makes trouble in source code; sometimes anything at all.
TROUBLE = st.text(st.sampled_from("\"'\\\n\r\t #{}%\x00\u2028\ud800ab"), max_size=40) | st.text(max_size=40)
PATIENT = settings(deadline=None, max_examples=60)
NAMES = st.lists(
    st.text(st.sampled_from("aAbB12_-. $éclass"), max_size=8) | st.text(max_size=12), unique=True, max_size=30
)


@PATIENT
@given(TROUBLE)
def test_a_docstring_says_what_was_said_and_ends_where_it_should(text: str):
    shown = visible(text, 1_000)
    source = f"def f():\n{docstring(shown, '    ')}\n    ...\n"
    source.encode()
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    said, rest = function.body
    assert isinstance(said, ast.Expr)
    assert isinstance(said.value, ast.Constant)
    assert isinstance(rest, ast.Expr)
    assert inspect.cleandoc(said.value.value) == inspect.cleandoc(shown)


@PATIENT
@given(TROUBLE)
def test_a_line_is_one(text: str):
    line = one_line(text, 100)
    assert line.splitlines() in ([], [line])
    assert ast.parse(f"x = 1  # {line}\n").body


@PATIENT
@given(NAMES)
def test_every_name_is_pythons_and_no_two_are_alike(names: list[str]):
    for ignore_case in (False, True):
        found = assigned(names, fallback="tool", avoided={"a"}, ignore_case=ignore_case)
        assert [*found] == names
        given_names = [name.lower() if ignore_case else name for name in found.values()]
        assert len({*given_names}) == len(names)
        assert all(name.isidentifier() and not keyword.iskeyword(name) and name != "a" for name in found.values())


@PATIENT
@given(NAMES, st.randoms())
def test_the_order_in_which_they_are_listed_does_not_matter(names: list[str], chance: object):
    shuffled = sorted(names, key=lambda name: hash((name, str(chance))))
    assert assigned(shuffled, fallback="tool") == assigned(names, fallback="tool")


def test_a_person_who_is_asked_sees_every_argument_and_what_is_left_out():
    shown = plain_arguments({"padding": "x" * 9_000, "to": "evil\u200b\u202e\n.example"}, 2_000)
    assert '"to": "evil\\u200b\\u202e\\n.example"' in shown
    assert "8,002 more characters that are not shown here" in shown
    assert len(shown) < 3_000
    many = plain_arguments({f"{'n' * 5_000}{number}": number for number in range(1_000)}, 2_000)
    assert many.endswith("… and 960 more arguments that are not shown here")
    assert len(many) < 10_000


def test_a_name_is_found_among_thousands_that_are_all_a_little_like_it() -> None:
    known = [f"read_{number}_file" for number in range(3_000)]
    assert suggestion("read_txt_file", [*known, "read_text_file"]) == ": did you mean 'read_text_file'?"
    assert suggestion("", ["add"]) == ": there is 'add'"
    assert suggestion("add", []) == ""
