"""Every parser that reads what others wrote, on texts made for it: twice the text takes at most thrice as long.

Regular expressions have their own test (`test_hostile_patterns.py`), and so does the count of JSON values.
"""

from collections.abc import Callable
from contextlib import suppress

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from belljar.console.frames import _document  # pyright: ignore[reportPrivateUsage]
from belljar.errors import BelljarError
from belljar.http import jsonrpc
from belljar.outputs import terminal_text, tracebacks
from belljar.outputs.export_formats import as_python
from belljar.outputs.html import highlighted
from belljar.policy.cell_syntax import Unreadable, read_cell
from belljar.skills import front_matter
from belljar.toolbox import session_server
from hostile_texts import slow_texts

PARSERS: dict[str, Callable[[str], object]] = {
    "HTML of a cell": lambda text: _document(text.encode(), "text/html", runs_scripts=False),
    "Markdown of a cell": lambda text: _document(text.encode(), "text/markdown", runs_scripts=False),
    "code to colour": highlighted,
    "code of a cell as a script": as_python,
    "code for a policy": read_cell,
    "a skill": lambda text: front_matter.parse(f"---\nname: a\n{text}"),
    "the description of a skill": lambda text: front_matter.parse(f"---\nname: a\ndescription: {text}\n---\n"),
    "a message": lambda text: jsonrpc.parse_message(text.encode()),
    "a member of a message": lambda text: jsonrpc.parse_message(b'{"jsonrpc":"2.0","id":1,"method":' + text.encode()),
    "a request of a session": lambda text: session_server.parse(text.encode()),
    "a traceback": lambda text: tracebacks.short_traceback(text.split("\n")),
    "warnings": tracebacks.short_warnings,
    "printed text": terminal_text.as_plain,
    "printed text with colours": terminal_text.coloured,
    "a requirement": Requirement,
}
# What is read token by token in Python.
THOROUGH = ("Markdown of a cell", "code to colour", "code for a policy")
COMMANDS = ("a?\n", "!a\n", "%a\n", "a=!b\n")
# IPython reads a cell again for each of its commands, which has a limit; of brackets, YAML reads 1,024 characters again
# for each.
BOUNDED = {"code for a policy": COMMANDS, "the description of a skill": tuple("[{")}


@pytest.mark.parametrize("name", PARSERS)
def test_no_parser_takes_more_than_three_times_as_long_for_twice_the_text(name: str) -> None:
    def parse(text: str) -> None:
        with suppress(BelljarError, Unreadable, InvalidRequirement, ValueError):
            PARSERS[name](text)

    longest = 2_048 if name in THOROUGH else 16_384
    assert not slow_texts(parse, spared=BOUNDED.get(name, ()), longest=longest)
