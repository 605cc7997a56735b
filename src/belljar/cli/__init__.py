"""The `belljar` command: its table of commands, and how errors become exit codes.

One file a command. The table names each command's function, and a command's module is imported only when the command
runs or prints its own help, so that `belljar --help` imports none of them and `belljar serve` does not pay for the
others. Commands print data to stdout and everything else to stderr.
"""

import gc
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from belljar.cli.streams import BROKEN_PIPE, filter_streams, indented, reset_colours
from belljar.errors import BelljarError, UsageError
from belljar.products import PRODUCTS, is_installed


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """One line of the command table."""

    target: str
    """The command's function, as `module:function`; a bare name is a module of this package."""
    help: str
    """The line that lists of commands show: the first paragraph of the function's docstring."""
    is_hidden: bool = False
    takes_rest: bool = False
    """Whether everything after its first argument is the arguments of something else, options included."""
    other_platforms: str = ""
    """The function on systems other than Linux; empty where the command is Linux's only."""


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """A command that has commands of its own."""

    help: str
    commands: Mapping[str, CommandEntry]


# A new command is a file in this package and a line in this table.
COMMANDS: dict[str, CommandEntry] = {
    "serve": CommandEntry(
        "workers:command",
        "Serve MCP over stdio, or over HTTP with --http HOST:PORT.",
        other_platforms="other_platforms:serve_command",
    ),
    "container": CommandEntry(
        "container:command",
        "Serve as the image does: stdio under `docker run -i`, else HTTP at port 8000 with a key of its own.",
    ),
    "run": CommandEntry(
        "run:command",
        "Run Python in a fresh session and save the figures it shows and the files it writes, apart from yours.",
        takes_rest=True,
        other_platforms="other_platforms:run_command",
    ),
    "map": CommandEntry(
        "map:command",
        "Run many pieces of code, each in a fork of one session or a new session, and write a line for each result.",
    ),
    "sessions": CommandEntry(
        "sessions:command",
        "List the sessions of all running servers of this data directory, once or, with --watch, every second.",
    ),
    "console": CommandEntry(
        "console:command", "Open the console: sessions, cells and their output, live, in a browser."
    ),
    "export": CommandEntry("export:command", "Save everything a session ran, with its output."),
    "attach": CommandEntry(
        "attach:command",
        "Share a live session: its variables and files, and what others run in it while you look on.",
    ),
    "jupyter": CommandEntry(
        "jupyter:command", "Add belljar to the kernels of JupyterLab, VS Code, papermill and nbclient, or remove it."
    ),
    "kernel": CommandEntry("kernel:command", "Be a Jupyter kernel with a session of its own.", is_hidden=True),
    "config": CommandEntry(
        "config:command",
        "Show every setting and where its value comes from, and which files are read.",
        other_platforms="config:command",
    ),
    "trust": CommandEntry(
        "trust:command",
        "Obey the belljar.toml of a folder, or its .env, when belljar is started there.",
        other_platforms="trust:command",
    ),
    "plugins": CommandEntry(
        "plugins:command", "List the plugins, what they hook into, and those that failed; exits with 1 if one did."
    ),
    "doctor": CommandEntry(
        "doctor:command", "Check what this host can do.", other_platforms="other_platforms:doctor_command"
    ),
    "install": CommandEntry(
        "install:command", "Tell an MCP client how to start belljar.", other_platforms="install:command"
    ),
    "key": CommandEntry("key:command", "Make a bearer key for HTTP.", other_platforms="key:command"),
    "reference": CommandEntry("reference:command", "Print a page of the reference as Markdown.", is_hidden=True),
}
# Commands of earlier versions, and what to use instead.
REMOVED: dict[str, str] = {
    "replay": "Run the notebook in Jupyter or papermill; `belljar jupyter install` gives them a sealed kernel",
    "top": "Use `belljar sessions --watch`",
}
GROUPS: dict[str, CommandGroup] = {
    "skills": CommandGroup(
        "The skills of sessions: list, show, check, approve, remove, history, export.",
        {
            "list": CommandEntry(
                "skills:list_command", "List the operator's skills and an owner's, and which of them are not in order."
            ),
            "show": CommandEntry("skills:show_command", "Print the SKILL.md of a skill, and name its files."),
            "check": CommandEntry(
                "skills:check_command",
                "Check a folder against the Agent Skills format; exits with 1 and tells line and reason if it breaks a"
                " rule.",
            ),
            "approve": CommandEntry(
                "skills:approve_command",
                "Let all sessions of its owner see a saved skill; an earlier version is the current one again.",
            ),
            "remove": CommandEntry(
                "skills:remove_command", "Remove a saved skill with all its versions, or one of them."
            ),
            "history": CommandEntry("skills:history_command", "List the versions of a saved skill, the latest first."),
            "export": CommandEntry(
                "skills:export_command",
                "Write a saved skill as a folder that Claude, Codex, VS Code and Cursor read.",
            ),
        },
    ),
    "inbox": CommandGroup(
        "What waits for a person: list, show, answer, watch.",
        {
            "list": CommandEntry("inbox:list_command", "List what waits for a person, and what was answered lately."),
            "show": CommandEntry("inbox:show_command", "Show a question whole, with the fields of its answer."),
            "answer": CommandEntry(
                "inbox:answer_command",
                "Answer a question: allow it, fill in its fields, or decline it. Fields that are not given are asked"
                " for.",
            ),
            "watch": CommandEntry(
                "inbox:watch_command",
                "Stay and show questions as they come; while you watch, cells whose client cannot ask may ask you.",
            ),
        },
    ),
    "env": CommandGroup(
        "The environments of sessions: list, create, check, remove, lock.",
        {
            "list": CommandEntry(
                "env:list_command",
                "List the environments that sessions can ask for: kind, Python, packages, size and state.",
            ),
            "create": CommandEntry(
                "env:create_command",
                "Make managed environments now rather than for the first session, and what others lack to run"
                " sessions.",
            ),
            "check": CommandEntry(
                "env:check_command",
                "See whether environments are there and can run sessions; exits with 1 if one cannot. Makes nothing.",
            ),
            "remove": CommandEntry(
                "env:remove_command",
                "Remove managed environments from the disk; the next session that asks for one makes it again.",
            ),
            "lock": CommandEntry(
                "env:lock_command",
                "Print the packages of a session at their versions, its own included, to make the same environment"
                " again.",
            ),
        },
    ),
    "toolbox": CommandGroup(
        "The MCP servers that sessions can call: list, search, call, sync.",
        {
            "list": CommandEntry("toolbox:list_command", "Connect to the servers and list them, or the tools of one."),
            "search": CommandEntry("toolbox:search_command", "Find tools, as search_tools does for a model."),
            "call": CommandEntry(
                "toolbox:call_command",
                "Call one tool and print what it answers; exits with 1 when the tool reports an error.",
            ),
            "sync": CommandEntry(
                "toolbox:sync_command", "Write the tools as Python, as sessions see them, into the folder servers."
            ),
        },
    ),
    "fleet": CommandGroup(
        "The machines that share their sessions: up, join, down, status, drain.",
        {
            "up": CommandEntry(
                "fleet_ray:up_command",
                "Start a fleet on this machine: its server, and the head of a cluster of Ray.",
            ),
            "join": CommandEntry(
                "fleet_ray:join_command",
                "Make this machine one of a fleet: start its server, and join the cluster of Ray.",
            ),
            "down": CommandEntry(
                "fleet_ray:down_command",
                "Take this machine out of its fleet: end its server in good order, then Ray here.",
            ),
            "status": CommandEntry(
                "fleet:status_command",
                "List the servers of the fleet and how they are, as the one of this data directory knows them.",
            ),
            "drain": CommandEntry("fleet:drain_command", "Empty a server, so that its machine can be taken away."),
        },
    ),
    "journal": CommandGroup(
        "The journal's file: check, salvage.",
        {
            "check": CommandEntry(
                "journal:check_command",
                "Read the whole journal and say whether it is in order; exits with 1 if it is damaged.",
            ),
            "salvage": CommandEntry(
                "journal:salvage_command",
                "Recover what can be read of a damaged journal into a new file, which takes its place.",
            ),
        },
    ),
    "policy": CommandGroup(
        "Check a policy file, and try what it decides.",
        {
            "check": CommandEntry(
                "policy:check_command",
                "Check a policy file; exits with 2 and tells line and reason if it is not in order.",
            ),
            "test": CommandEntry(
                "policy:try_command",
                "Tell what a policy decides on a call or on code; exits with 0 for what is allowed, with 1 for the"
                " rest.",
            ),
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exit with 2 for an error that the caller can mend, with 1 for any other.

    Where nobody reads the output any more, as behind `| head`, it ends without a word and with the status of SIGPIPE.
    """
    streams = filter_streams()
    _ensure_home()
    try:
        status = _run(arguments)
        streams[0].flush()
    except BrokenPipeError:
        status = BROKEN_PIPE
    finally:
        reset_colours()
    # A broken pipe that our parser of arguments has caught is status 1 to it.
    sys.exit(BROKEN_PIPE if any(stream.is_unread for stream in streams) else status)


def _run(arguments: Sequence[str] | None) -> int | str | None:
    try:
        application()(arguments, prog_name="belljar")
    except SystemExit as end:
        return end.code
    except BelljarError as error:
        print(f"error: {indented(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {indented(error.hint)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _ensure_home() -> None:
    """Give a user that is in no passwd file the home directory `/`, as container engines do; then errors name paths."""
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - `Path` raises an error instead
        os.environ["HOME"] = "/"


def application() -> TyperGroup:
    """Return the group of all commands, none of which is imported yet."""
    root = _typer(add_completion=True)
    root.callback()(_belljar)
    group = cast("TyperGroup", typer.main.get_command(root))
    _add_commands(group, COMMANDS)
    for name, hint in REMOVED.items():
        group.add_command(RefusedCommand(name, f"belljar {name} was removed", hint))
    groups = command_groups()
    for package, tables in PRODUCTS.items():
        for name in tables.keys() - groups.keys():
            why = f"this installation of belljar has no {package.rpartition('.')[2]}"
            group.add_command(RefusedCommand(name, why, f"belljar {name} comes with the whole of belljar-mcp"))
    for name, entry in groups.items():
        subgroup = TyperGroup(
            name=name, help=entry.help, short_help=entry.help, no_args_is_help=True, rich_markup_mode=None
        )
        _add_commands(subgroup, entry.commands)
        group.add_command(subgroup)
    return group


def command_groups() -> dict[str, CommandGroup]:
    """Return all groups of commands: ours, and those of the products that are there."""
    found = dict(GROUPS)
    for package, tables in PRODUCTS.items():
        for name, target in tables.items() if is_installed(package) else ():
            module, _, table = target.partition(":")
            found[name] = getattr(import_module(module), table)
    return found


def load_command(entry: CommandEntry) -> Callable[..., None]:
    """Import the function of a command. Modules that only Linux has are imported by no other way from here."""
    module, _, function = (entry.target if sys.platform == "linux" else entry.other_platforms).partition(":")
    path = module if "." in module else f"{__name__}.{module}"
    if path not in sys.modules:
        with uncollected_imports():
            import_module(path)
    return getattr(sys.modules[path], function)


@contextmanager
def uncollected_imports() -> Generator[None]:
    """Import without the garbage collector, which takes 0.4 s of the 1.5 s that importing the server takes otherwise.

    Modules stay until the process ends, so what was imported is also kept out of later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class RefusedCommand(TyperCommand):
    """A command that only says why it is not here, and what to use instead."""

    def __init__(self, name: str, why: str, hint: str) -> None:
        super().__init__(name, hidden=True)
        self._refusal = UsageError(why, hint=hint)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Refuse whatever is asked of it, its help included."""
        raise self._refusal


class LazyCommand(TyperCommand):
    """A command that is listed from the table, and imported when its arguments are parsed."""

    def __init__(self, name: str, entry: CommandEntry) -> None:
        # Named twice, because lists of commands cut the help at 45 letters, and the short help nowhere.
        super().__init__(name, help=entry.help, short_help=entry.help, hidden=entry.is_hidden, rich_markup_mode=None)
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return a context of the imported command, which the group then invokes instead of this one."""
        if sys.platform != "linux" and not self._entry.other_platforms:
            self.callback = self._refuse
            return super().make_context(
                info_name, args, parent, **extra, ignore_unknown_options=True, allow_extra_args=True
            )
        table = _typer()
        settings = {"allow_interspersed_args": False} if self._entry.takes_rest else None
        table.command(self.name, context_settings=settings)(load_command(self._entry))
        return typer.main.get_command(table).make_context(info_name, args, parent, **extra)

    def _refuse(self) -> None:
        raise UsageError(
            f"belljar {self.name} needs Linux, and this is {sys.platform}",
            hint="Run it where the server runs: in its container (`docker exec`), in WSL2 or Lima, or on its machine",
        )


def _add_commands(group: TyperGroup, entries: Mapping[str, CommandEntry]) -> None:
    for name, entry in entries.items():
        group.add_command(LazyCommand(name, entry))


def _typer(*, add_completion: bool = False) -> typer.Typer:
    # With a markup mode, typer would import rich to draw boxes around its help and its errors.
    return typer.Typer(
        add_completion=add_completion, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        # Only --version needs it, and with it come the packages `email` and `zipfile`.
        from belljar.distribution import own_version

        print(f"belljar {own_version()}")
        raise typer.Exit


def _belljar(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run the Python that AI agents write: stateful, sealed off, in plain view."""
