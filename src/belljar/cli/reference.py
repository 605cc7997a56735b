"""`belljar reference`: print pages of the documentation, made from the settings table and from the commands' help."""

import io
from contextlib import redirect_stdout
from typing import Annotated, Literal

import typer

from belljar.cli import COMMANDS, application, command_groups
from belljar.settings import MEBIBYTE, Settings, variable
from belljar.settings.fields import allowed, default

_INTRODUCTION = """\
# Settings

<!-- Made by `belljar reference`; change src/belljar/settings/table.py instead. -->

Every setting can come from four places. A later one wins over an earlier one:

1. the default;
2. `belljar.toml`: the user's (`~/.config/belljar/belljar.toml` on Linux), then the one in the working directory. The
   variable `BELLJAR_CONFIG` names another file to read instead of the latter;
3. an environment variable. Lists are separated by commas, or JSON as `belljar config` prints it; an empty variable
   counts as not set;
4. a flag of the command.

`belljar config` shows each value in force and where it comes from. A name that does not exist, a wrong type or a value
out of range is an error that names the setting, the value and the source. Relative paths count from the working
directory.

The `belljar.toml` of the working directory may be anybody's, so commands read it only once you trust it (`belljar
trust`), and for as long as it stays what it is; `belljar trust --remove` ends that. The same goes for a `.env` there
(`belljar trust .env`; see `env_file`). One that is not read is named, with the command that trusts it, on stderr and by
`belljar doctor`. The user's own file, a file that `BELLJAR_CONFIG` names, variables and flags need no trust. No folder
above the working directory is looked into.

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
_WIDTH_CHARACTERS = 100


def command(
    name: Annotated[Literal["settings", "cli"], typer.Argument(help="Which page.", show_default=True)] = "settings",
) -> None:
    """Print a page of the reference as Markdown."""
    print(_settings_page() if name == "settings" else _commands_page(), end="")


def _settings_page() -> str:
    """Return the page of all settings."""
    return "\n".join([_INTRODUCTION, *map(_setting_section, Settings.model_fields)])


def _setting_section(name: str) -> str:
    field = Settings.model_fields[name]
    size = field.get_default() if name.endswith("_bytes") else 0
    in_mib = f" ({size // MEBIBYTE} MiB)" if size and size % MEBIBYTE == 0 else ""
    return (
        f"## `{name}`\n\n{field.description}\n\n- Takes: {allowed(Settings, name)}\n"
        f"- Default: {default(Settings, name)}{in_mib}\n- Variable: `{variable(name)}`\n"
    )


def _commands_page() -> str:
    """Return the page of all commands that are not hidden."""
    names = [[name] for name, entry in COMMANDS.items() if not entry.is_hidden]
    names += [[group, name] for group, entry in command_groups().items() for name in entry.commands]
    sections = [f"## `belljar {' '.join(command)}`\n\n```text\n{_help_of(command).strip()}\n```\n" for command in names]
    return "\n".join([_COMMANDS_INTRODUCTION, *sections])


def _help_of(command: list[str]) -> str:
    """Return the help of a command as the command prints it."""
    with redirect_stdout(io.StringIO()) as printed:
        application().main(
            [*command, "--help"], prog_name="belljar", standalone_mode=False, terminal_width=_WIDTH_CHARACTERS
        )
    return printed.getvalue()
