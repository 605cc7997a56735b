"""What an operator's signals do to a server: the first ends it in order, later ones do not disturb that."""

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop:
    """Whether the server was told to stop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.has_started = False
        """From here on whoever serves looks at `asked`."""
        self._main = asyncio.current_task()

    def on_signal(self) -> None:
        """Ask for the end. A second time while the server still starts, give up starting."""
        if self.asked.is_set() and not self.has_started and self._main is not None:
            self._main.cancel()
        self.asked.set()


@contextmanager
def stop_signals() -> Generator[Stop]:
    """Listen to the signals until everything has been closed: clients send SIGTERM after the end of the input.

    By default it would kill the process in the middle of writing variables to disk.
    """
    loop, stop = asyncio.get_running_loop(), Stop()
    # What the parent had ignored stays ignored: nohup does that with SIGHUP.
    numbers = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, stop.on_signal)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
