"""Progress on a terminal, drawn on stderr and removed when the work is over; other streams get no progress bars."""

import itertools
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from belljar.cli.streams import one_line, raw_stream

_DETAIL_CHARACTERS = 60
LINE_EVERY_S = 5.0
"""How often a stream that is no terminal gets a line, in a CI job for example."""


class Spinner:
    """Shows work of unknown length: what is done and for how long.

    Where stderr is no terminal, it prints one line at the start, and one for the current step every few seconds.
    """

    def __init__(self, what: str) -> None:
        self._bar = None
        self._what = one_line(what)
        self._told_at = time.monotonic()
        if not sys.stderr.isatty():
            print(self._what, file=sys.stderr, flush=True)
            return
        # rich takes 100 ms to import, which a command in a pipe need not pay.
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        # On a narrow terminal the detail loses its end, and nothing else anything.
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
        )
        console = Console(file=raw_stream(sys.stderr))
        self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, expand=True)
        self._task = self._bar.add_task(self._what, total=None, detail="")
        self._bar.start()

    def update(self, detail: str) -> None:
        """Show the current step."""
        detail = one_line(" ".join(detail.split()))[:_DETAIL_CHARACTERS]
        if self._bar is not None:
            self._bar.update(self._task, detail=detail)
        elif time.monotonic() - self._told_at >= LINE_EVERY_S:
            self._told_at = time.monotonic()
            print(f"{self._what}: {detail}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove it from the screen."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def progress_bar(total: int) -> Generator[Callable[[str], None]]:
    """Show which of a known number of steps is running; yield what is called when the next one begins.

    Where stderr is no terminal, nothing is printed.
    """
    if not sys.stderr.isatty() or not total:
        yield lambda _: None
        return
    # rich takes 100 ms to import, which a command in a pipe need not pay.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=raw_stream(sys.stderr)), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)
        begun = itertools.count()
        yield lambda what: bar.update(task, description=one_line(what), completed=next(begun))
