"""SIGINT: it raises in a running cell, is delayed while a message is half sent, and is ignored between cells."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from .fork import set_handler


class Interrupts:
    """The process's one SIGINT handler."""

    def __init__(self) -> None:
        self._is_cell = False
        self._is_preparing = False
        self._delays = 0
        self._is_pending = False

    def install(self) -> None:
        """Install the handler, also over one that a cell has installed."""
        set_handler(signal.SIGINT, self._on_signal)

    def _on_signal(self, _number: int, _frame: "FrameType | None") -> None:
        __tracebackhide__ = True  # the cell's traceback ends where the cell was, not here
        if not self._is_cell:
            return
        if self._delays or self._is_preparing:
            self._is_pending = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def cell(self) -> Generator[None, None, None]:
        """Let interrupts raise in the block, from `enable` on.

        Not before, because IPython runs callbacks before the cell's code and swallows whatever is raised in them.
        """
        self.install()
        self._is_pending = False
        self._is_preparing = True
        try:
            self._is_cell = True
            yield
        finally:
            self._is_cell = self._is_preparing = False

    def enable(self) -> bool:
        """Let interrupts raise from now on, because the cell's own code begins; raise one that came before.

        Return False when it was called before for the same cell.
        """
        if not self._is_preparing:
            return False
        self._is_preparing = False
        self._raise_pending()
        return True

    @contextmanager
    def delayed(self) -> Generator[None, None, None]:
        """Delay interrupts until the block is over, so that no message is left half sent."""
        self._delays += 1
        try:
            yield
        finally:
            self._delays -= 1
        self._raise_pending()

    def _raise_pending(self) -> None:
        __tracebackhide__ = True
        if self._is_pending and not self._delays and not self._is_preparing and self._is_cell:
            self._is_pending = False
            raise KeyboardInterrupt
