"""The runner's short cut to the text of a value gives what IPython gives, also where a session has changed that."""

from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

from belljar.inside.runner.rich_output import gather_printers, text_of

_VALUES = (0, -7, 10**40, True, 1.5, "", "it's", 'a "b"\n\ttab\u2028é', b"\0\n", None, [1, "x"], {"a": (1,)}, {1})


def _formatter() -> Any:
    display: Any = DisplayFormatter()
    gather_printers(display)
    return display.formatters["text/plain"]


@pytest.mark.parametrize("value", _VALUES)
def test_text_is_that_of_ipython(value: object) -> None:
    formatter = _formatter()
    assert text_of(value, formatter) == formatter(value)
    formatter.pprint = False
    assert text_of(value, formatter) == repr(value)


def test_printer_that_a_session_registers_makes_the_text() -> None:
    formatter = _formatter()
    formatter.for_type(int, lambda value, printer, _: printer.text(f"<{value}>"))
    assert text_of(3, formatter) == "<3>"
    replaced = _formatter()
    replaced.type_printers = {}
    replaced.for_type_by_name("builtins", "str", lambda value, printer, _: printer.text(value.upper()))
    assert text_of("a", replaced) == "A"


def test_printer_of_one_object_makes_its_text() -> None:
    formatter = _formatter()
    value = "the one"
    formatter.singleton_printers[id(value)] = lambda _value, printer, _: printer.text("1")
    assert (text_of(value, formatter), text_of("other", formatter)) == ("1", "'other'")


def test_number_of_too_many_digits_is_left_to_ipython(capsys: pytest.CaptureFixture[str]) -> None:
    assert text_of(10**5_000, _formatter()) is None
    assert "ValueError" in capsys.readouterr().err
