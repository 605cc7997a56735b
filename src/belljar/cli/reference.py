"""`belljar reference`: pages of the documentation, made from the settings table and from the commands themselves."""

from typing import Annotated, Literal

import typer

_INTRODUCTION = """\
# Settings

<!-- Made by `belljar reference`; change src/belljar/settings/table.py instead. -->

Every setting can come from four places. A later one wins over an earlier one:

1. the default;
2. `belljar.toml`: the user's (`~/.config/belljar/belljar.toml` on Linux), then the one in the working directory. The
   variable `BELLJAR_CONFIG` names another file to read instead of the latter;
3. an environment variable. Lists are separated by commas; an empty variable counts as not set;
4. a flag of the command.

`belljar config` shows each value in force and where it comes from. A name that does not exist, a wrong type or a value
out of range is an error that names the setting, the value and the source. Relative paths count from the working
directory.

The `belljar.toml` of the working directory may be anybody's, so by itself it only tightens: it lowers limits, closes
hosts, turns guardrails on. What else it says is ignored, and named on stderr. `belljar trust` obeys all of it, for as
long as the file stays what it is; `belljar trust --remove` ends that. Below, each setting says what such a file may do
without trust. The user's own file, a file that `BELLJAR_CONFIG` names, variables and flags need none. No `.env` is
read, and no folder above the working directory is looked into.

```toml
# belljar.toml
environment = "/srv/analysis/.venv"
max_sessions = 16
session_idle_s = 900

[environments.geo]
kind = "conda"
path = "geo"
```
"""


_COMMANDS_INTRODUCTION = """\
# Command line

<!-- Made by `belljar reference cli`; change src/belljar/cli instead. -->

Data goes to stdout, everything else to stderr. A mistake in the call exits with 2, another failure with 1; both say
what is wrong and, after `hint:`, what to do.

Nothing that a session, a server or a file says acts on your terminal. Of output that you asked for, what code prints or
an exported document, a terminal gets colours and movements within a line, and no other command; a file or a pipe gets
it byte for byte, so look at it with a program that shows control characters. In belljar's own lines, whatever would act
is shown as \ufffd everywhere.

Nothing is imported from the working directory, and files of sessions are never saved into it. Where the `belljar`
script is not at hand, start it with `python -P -m belljar`: without `-P`, Python itself looks there before belljar
begins.
"""
_WIDTH = 100


def command(
    name: Annotated[Literal["settings", "cli"], typer.Argument(help="Which page.", show_default=True)] = "settings",
) -> None:
    """Print a page of the reference as Markdown."""
    print(page() if name == "settings" else commands_page(), end="")


def commands_page() -> str:
    """The help of every command, as the command prints it."""
    from typer.testing import CliRunner

    from belljar.cli import COMMANDS, GROUPS, HIDDEN, application

    names = [[name] for name in COMMANDS if name not in HIDDEN]
    names += [[group, name] for group, (_, commands) in GROUPS.items() for name in commands]
    sections: list[str] = []
    for words in names:
        printed = CliRunner().invoke(application(), [*words, "--help"], prog_name="belljar", terminal_width=_WIDTH)
        sections.append(f"## `belljar {' '.join(words)}`\n\n```text\n{printed.output.strip()}\n```\n")
    return "\n".join([_COMMANDS_INTRODUCTION, *sections])


def page() -> str:
    """The page, ending in a newline."""
    from belljar.settings import Settings

    return "\n".join([_INTRODUCTION, *map(_entry, Settings.model_fields)])


def _entry(name: str) -> str:
    from belljar.settings import MEBIBYTE, Settings, allowed, default, untrusted, variable

    field = Settings.model_fields[name]
    size = field.get_default() if name.endswith("_bytes") else 0
    in_words = f" ({size // MEBIBYTE} MiB)" if size and size % MEBIBYTE == 0 else ""
    return (
        f"## `{name}`\n\n{field.description}\n\n"
        f"- Takes: {allowed(name)}\n- Default: {default(name)}{in_words}\n- Variable: `{variable(name)}`\n"
        f"- A file that is not trusted: {untrusted(name)}\n"
    )
