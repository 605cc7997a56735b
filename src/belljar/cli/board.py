"""What `belljar top` shows: a line for each session, from two looks at the servers; as plain text and as a table.

Knows nothing of where the looks come from, nor how often they are taken.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from belljar.cli.columns import columns
from belljar.cli.sessions import duration
from belljar.cli.streams import one_line
from belljar.control import ServerAnswer, SessionLine

_TITLES = (
    "server",
    "session",
    "owner",
    "state",
    "environment",
    "memory",
    "cpu",
    "cells",
    "idle",
    "checkpoints",
    "last cause",
)
_NUMBERS = ("memory", "cpu", "cells", "idle", "checkpoints")
_NONE = "-"
_ID_CHARACTERS = 12
# The line above the table, the table's own head, and the line below it.
_FRAME_LINES = 4
# On narrower screens what is least asked for makes room for the rest, which would be cut beyond reading.
_LEAST_WIDTHS = {
    "environment": 118,
    "checkpoints": 96,
    "owner": 80,
    "last cause": 72,
    "server": 60,
    "idle": 52,
    "cells": 44,
    "cpu": 36,
    "memory": 30,
}
_STATE_STYLES = {"running": "bold green", "fresh": "dim"}


@dataclass(frozen=True, slots=True)
class Look:
    """What all servers said at one moment."""

    servers: Sequence[ServerAnswer]

    def lines(self) -> Iterator[tuple[int, SessionLine]]:
        """Each session with its server's pid: by server, oldest first."""
        for server in self.servers:
            for line in server.sessions or []:
                yield server.pid, line


class Board:
    """One frame."""

    def __init__(self, folder: str, look: Look, before: Look | None = None) -> None:
        self._folder = folder
        self._look = look
        self._shares = _cpu_shares(look, before)

    def text(self) -> str:
        """For scripts: whole ids, nothing cut; empty when there is no session."""
        rows = [[*self._cells(pid, line, is_whole=True)] for pid, line in self._look.lines()]
        return columns([_TITLES, *rows]) if rows else ""

    def notes(self) -> list[str]:
        """What there is to say beside the table."""
        if not self._look.servers:
            return [f"no running server uses {self._folder}"]
        silent = [server.pid for server in self._look.servers if server.sessions is None]
        said = [f"the server with pid {pid} did not answer" for pid in silent]
        return said if any(True for _ in self._look.lines()) or silent else ["no session is open"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The whole screen; what does not fit on it is counted."""
        lines = [*self._look.lines()]
        below = [_line(note, "yellow") for note in self.notes()]
        room = max(1, (options.height or console.height) - _FRAME_LINES - len(below))
        if len(lines) > room:
            below.append(_line(f"… and {len(lines) - room} more", "dim"))
        table = [self._table(lines[:room], options.max_width)] if lines else []
        yield Group(self._summary(lines), *table, *below)

    def _table(self, lines: Sequence[tuple[int, SessionLine]], width: int) -> Table:
        table = Table(box=None, expand=True, pad_edge=False, header_style="bold")
        shown = [title for title in _TITLES if width >= _LEAST_WIDTHS.get(title, 0)]
        for title in shown:
            justify = "right" if title in _NUMBERS else "left"
            ratio = 1 if title == _TITLES[-1] else None
            table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis", ratio=ratio)
        for pid, line in lines:
            texts = zip(_TITLES, self._cells(pid, line, is_whole=False), strict=True)
            cells = {title: Text(one_line(text)) for title, text in texts}
            cells["state"].stylize(_STATE_STYLES.get(line.info.state, ""))
            table.add_row(*(cells[title] for title in shown))
        return table

    def _summary(self, lines: Sequence[tuple[int, SessionLine]]) -> Text:
        running = sum(line.info.state == "running" for _, line in lines)
        memory_mb = sum(line.info.memory_mb for _, line in lines)
        counted = f"{_count(len(self._look.servers), 'server')}, {_count(len(lines), 'session')}, {running} running"
        return _line(f"belljar top  {time.strftime('%H:%M:%S')}  {counted}, {memory_mb:,.0f} MB  q ends\n", "dim")

    def _cells(self, pid: int, line: SessionLine, *, is_whole: bool) -> Iterator[str]:
        info = line.info
        yield str(pid)
        yield info.session_id if is_whole else info.session_id[:_ID_CHARACTERS]
        yield line.principal
        yield info.state
        yield info.environment if is_whole else _short(info.environment)
        yield f"{info.memory_mb:,.0f} MB"
        share = self._shares.get(info.session_id)
        yield _NONE if share is None else f"{share:.0%}"
        yield str(info.executions)
        yield _NONE if info.state == "running" else duration(_since(info.last_used_at))
        yield str(info.checkpoints)
        yield info.last_cause or _NONE


def _line(text: str, style: str) -> Text:
    return Text("\n".join(map(one_line, text.split("\n"))), style=style, no_wrap=True, overflow="ellipsis")


def _cpu_shares(look: Look, before: Look | None) -> Mapping[str, float]:
    """Of one processor, between the two looks; nothing for a session whose kernel is another one by now."""
    earlier = {line.info.session_id: line for _, line in before.lines()} if before else {}
    shares: dict[str, float] = {}
    for _, line in look.lines():
        known = earlier.get(line.info.session_id)
        passed_s = line.read_at_s - known.read_at_s if known else 0.0
        if known is not None and passed_s > 0 and line.cpu_s >= known.cpu_s:
            shares[line.info.session_id] = (line.cpu_s - known.cpu_s) / passed_s
    return shares


def _since(moment: str) -> float:
    return max(0.0, time.time() - datetime.fromisoformat(moment).timestamp())


def _short(environment: str, most: int = 20) -> str:
    """Of a path, the name of the environment's folder."""
    path = PurePath(environment)
    name = path.parent.parent.name if path.parent.name == "bin" else path.name
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
