"""Progress on a terminal, drawn on stderr and removed when the work is over; other streams get no progress bars."""

import sys

from belljar.cli.streams import one_line, raw_stream

_DETAIL_CHARACTERS = 60


class Spinner:
    """Shows work of unknown length: what is done and for how long. Where stderr is no terminal, it prints one line."""

    def __init__(self, what: str) -> None:
        self._bar = None
        if not sys.stderr.isatty():
            print(what, file=sys.stderr, flush=True)
            return
        # rich takes 100 ms to import, which a command in a pipe need not pay.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
        )
        console = Console(file=raw_stream(sys.stderr))
        self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
        self._task = self._bar.add_task(one_line(what), total=None, detail="")
        self._bar.start()

    def update(self, detail: str) -> None:
        """Show the current step."""
        if self._bar is not None:
            self._bar.update(self._task, detail=one_line(" ".join(detail.split()))[:_DETAIL_CHARACTERS])

    def close(self) -> None:
        """Remove it from the screen."""
        if self._bar is not None:
            self._bar.stop()


class ProgressBar:
    """Shows which of a known number of steps is running. Where stderr is no terminal, it prints nothing."""

    def __init__(self, total: int) -> None:
        self._bar = None
        self._begun = 0
        if not sys.stderr.isatty() or not total:
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
        console = Console(file=raw_stream(sys.stderr))
        self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
        self._task = self._bar.add_task("starting a session", total=total)
        self._bar.start()

    def step(self, what: str) -> None:
        """Show that the next step begins."""
        if self._bar is not None:
            self._bar.update(self._task, description=one_line(what), completed=self._begun)
            self._begun += 1

    def close(self) -> None:
        """Remove it from the screen."""
        if self._bar is not None:
            self._bar.stop()
