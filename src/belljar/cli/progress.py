"""A sign of life on a terminal: which step of how many. Nothing elsewhere, and nothing that stays on the screen."""

import sys

from belljar.cli.streams import one_line, raw_stream

_DETAIL_CHARACTERS = 60


class Activity:
    """Work whose end nobody knows: what happens now and for how long; elsewhere than on a terminal a line a stage."""

    def __init__(self, what: str) -> None:
        self._bar = None
        if not sys.stderr.isatty():
            print(what, file=sys.stderr, flush=True)
            return
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
        )
        self._bar = Bar(*columns, console=Console(file=raw_stream(sys.stderr)), transient=True, redirect_stdout=False)
        self._task = self._bar.add_task(one_line(what), total=None, detail="")
        self._bar.start()

    def tell(self, detail: str) -> None:
        """What it is busy with."""
        if self._bar is not None:
            self._bar.update(self._task, detail=one_line(" ".join(detail.split()))[:_DETAIL_CHARACTERS])

    def close(self) -> None:
        """Take it off the screen."""
        if self._bar is not None:
            self._bar.stop()


class Progress:
    """Shown on stderr while it is open, if that is a terminal."""

    def __init__(self, total: int) -> None:
        self._bar = None
        self._begun = 0
        if not sys.stderr.isatty() or not total:
            return
        # 100 ms to import, which a command in a pipe need not pay.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Bar(*columns, console=Console(file=raw_stream(sys.stderr)), transient=True, redirect_stdout=False)
        self._task = self._bar.add_task("starting a session", total=total)
        self._bar.start()

    def step(self, what: str) -> None:
        """The next step begins."""
        if self._bar is not None:
            self._bar.update(self._task, description=one_line(what), completed=self._begun)
            self._begun += 1

    def close(self) -> None:
        """Take it off the screen."""
        if self._bar is not None:
            self._bar.stop()
