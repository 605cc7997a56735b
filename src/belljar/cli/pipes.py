"""Stdout as commands with a lot to say use it: whatever it can encode, and a reader that may leave."""

import os
import signal
import sys

from belljar.cli.streams import write_output

BROKEN_PIPE = 128 + signal.SIGPIPE


def put_out(text: str) -> int:
    """Write text to stdout; the exit status, which is a shell's for SIGPIPE when the reader has gone."""
    try:
        write_output(sys.stdout, text)
    except BrokenPipeError:
        # Python would complain about it once more when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return 0
