"""The table that `belljar top` shows: a row for each session, as plain text and for rich.

It is computed from two snapshots of the servers; `top` takes them and decides how often.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from belljar.cli.sessions import duration
from belljar.cli.streams import columns, one_line
from belljar.control import ServerAnswer, SessionLine

_TITLES = (
    "server",
    "session",
    "owner",
    "state",
    "environment",
    "memory",
    "gpu",
    "cpu",
    "cells",
    "idle",
    "checkpoints",
    "last cause",
)
_NUMBERS = ("memory", "gpu", "cpu", "cells", "idle", "checkpoints")
_NONE = "-"
_ID_CHARACTERS = 12
# The summary and the blank line after it, the head of the table, and the line below the table.
_FRAME_LINES = 4
# Narrower screens leave these columns out, the least needed ones first, because all columns would be cut too short.
_MIN_WIDTHS = {
    "environment": 118,
    "checkpoints": 96,
    "gpu": 88,
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
class ServersSnapshot:
    """What all servers answered at one moment."""

    servers: Sequence[ServerAnswer]

    def lines(self) -> Iterator[tuple[int, SessionLine]]:
        """Yield each session with its server's pid: server by server, oldest session first."""
        for server in self.servers:
            for line in server.sessions or []:
                yield server.pid, line


class SessionTable:
    """The sessions of one snapshot, with the CPU that each used since the snapshot before."""

    def __init__(self, folder: str, snapshot: ServersSnapshot, before: ServersSnapshot | None = None) -> None:
        self._folder = folder
        self._snapshot = snapshot
        self._cpu_shares = _cpu_shares(snapshot, before)

    def text(self) -> str:
        """Return the table for scripts, with nothing shortened; empty when there is no session."""
        rows = [[*self._cells(pid, line, is_whole=True)] for pid, line in self._snapshot.lines()]
        return columns([_TITLES, *rows]) if rows else ""

    def notes(self) -> list[str]:
        """Return the lines to print beside the table."""
        if not self._snapshot.servers:
            return [f"no running server uses {self._folder}"]
        silent = [server.pid for server in self._snapshot.servers if server.sessions is None]
        unanswered = [f"the server with pid {pid} did not answer" for pid in silent]
        return unanswered if any(True for _ in self._snapshot.lines()) or silent else ["no session is open"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one whole screen, with a count of the sessions that do not fit on it."""
        lines = [*self._snapshot.lines()]
        below = [_line(note, "yellow") for note in self.notes()]
        room = max(1, (options.height or console.height) - _FRAME_LINES - len(below))
        if len(lines) > room:
            below.append(_line(f"… and {len(lines) - room} more", "dim"))
        table = [self._table(lines[:room], options.max_width)] if lines else []
        yield Group(self._summary(lines), *table, *below)

    def _table(self, lines: Sequence[tuple[int, SessionLine]], width: int) -> Table:
        table = Table(box=None, expand=True, pad_edge=False, header_style="bold")
        shown = [title for title in _TITLES if width >= _MIN_WIDTHS.get(title, 0)]
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
        gpu_mb = sum(line.info.gpu_memory_mb for _, line in lines)
        on_gpus = f", {gpu_mb:,.0f} MB on GPUs" if any(line.info.gpus for _, line in lines) else ""
        counted = f"{_count(len(self._snapshot.servers), 'server')}, {_count(len(lines), 'session')}, {running} running"
        summary = f"{time.strftime('%H:%M:%S')}  {counted}, {memory_mb:,.0f} MB{on_gpus}"
        return _line(f"belljar top  {summary}  q ends\n", "dim")

    def _cells(self, pid: int, line: SessionLine, *, is_whole: bool) -> Iterator[str]:
        info = line.info
        yield str(pid)
        yield info.session_id if is_whole else info.session_id[:_ID_CHARACTERS]
        yield line.principal
        yield info.state
        yield info.environment if is_whole else _short(info.environment)
        yield f"{info.memory_mb:,.0f} MB"
        yield f"{info.gpu_memory_mb:,.0f} MB" if info.gpus else _NONE
        share = self._cpu_shares.get(info.session_id)
        yield _NONE if share is None else f"{share:.0%}"
        yield str(info.executions)
        yield _NONE if info.state == "running" else duration(_since(info.last_used_at))
        yield str(info.checkpoints)
        yield info.last_cause or _NONE


def _line(text: str, style: str) -> Text:
    return Text("\n".join(map(one_line, text.split("\n"))), style=style, no_wrap=True, overflow="ellipsis")


def _cpu_shares(snapshot: ServersSnapshot, before: ServersSnapshot | None) -> Mapping[str, float]:
    """Return the share of one processor that each session used between the snapshots.

    A session whose kernel was restarted in between has none, because its CPU time starts at 0 again.
    """
    earlier = {line.info.session_id: line for _, line in before.lines()} if before else {}
    shares: dict[str, float] = {}
    for _, line in snapshot.lines():
        known = earlier.get(line.info.session_id)
        passed_s = line.read_at_s - known.read_at_s if known else 0.0
        if known is not None and passed_s > 0 and line.cpu_s >= known.cpu_s:
            shares[line.info.session_id] = (line.cpu_s - known.cpu_s) / passed_s
    return shares


def _since(moment: str) -> float:
    return max(0.0, time.time() - datetime.fromisoformat(moment).timestamp())


def _short(environment: str, most: int = 20) -> str:
    """Return the name of the environment's folder where the environment is a path."""
    path = PurePath(environment)
    name = path.parent.parent.name if path.parent.name == "bin" else path.name
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
