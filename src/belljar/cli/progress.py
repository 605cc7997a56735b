"""A sign of life on a terminal: which step of how many. Nothing elsewhere, and nothing that stays on the screen."""

import sys


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
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
        self._task = self._bar.add_task("starting a session", total=total)
        self._bar.start()

    def step(self, what: str) -> None:
        """The next step begins."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=self._begun)
            self._begun += 1

    def close(self) -> None:
        """Take it off the screen."""
        if self._bar is not None:
            self._bar.stop()
