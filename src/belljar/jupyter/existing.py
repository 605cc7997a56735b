"""An agent's live session as a kernel that front ends connect to by its connection file."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Literal

from belljar.attachments import open_attachment
from belljar.errors import InvalidArgument
from belljar.jupyter.application import serve
from belljar.jupyter.sessions import agents

# sun_path holds 108 bytes, the last of them a NUL; the sockets are named after the file, with a number.
_MAX_PATH_BYTES = 107 - len("-ipc-99")


def serve_existing(data_directory: Path, prefix: str, file: Path, transport: Literal["ipc", "tcp"]) -> None:
    """Serve until Ctrl-C; the file is there while it does."""
    session_id = asyncio.run(_check(data_directory, prefix))
    if file.exists():
        raise InvalidArgument(f"{file} exists already", hint="Name another file, or remove it if it is an old one")
    if not file.parent.is_dir():
        raise InvalidArgument(f"{file.parent} is not a folder", hint="Make it, or name another file")
    if transport == "ipc" and len(os.fsencode(file)) > _MAX_PATH_BYTES:
        raise InvalidArgument(
            f"{file} is too long a path for sockets beside it", hint="Name a shorter one, or use --transport tcp"
        )
    os.umask(0o077)  # the sockets, and the key in the file, are this user's alone
    serve(
        ["-f", str(file), f"--transport={transport}"],
        agents(data_directory, session_id),
        on_ready=lambda path: _say_ready(session_id, path),
    )


async def _check(data_directory: Path, prefix: str) -> str:
    """The session's whole id: refused now, rather than by the first cell."""
    async with open_attachment(data_directory, prefix) as attached:
        return attached.session_id


def _say_ready(session_id: str, path: str) -> None:
    print(f"session {session_id} is served until Ctrl-C", file=sys.stderr)
    print(f"connect with: jupyter console --existing {path}", file=sys.stderr, flush=True)
    print(path, flush=True)
