"""The process of a kernel: ipykernel's sockets, heartbeat and signals around a `BelljarKernel`.

Serves a session of its own, or an agent's live session that front ends connect to by its connection file. Does not
answer Jupyter's messages itself.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ipykernel.kernelapp import IPKernelApp
from tornado.ioloop import IOLoop
from traitlets import Type

from belljar.engine.remote_attachments import open_attachment
from belljar.errors import InvalidArgument
from belljar.jupyter.kernel import BelljarKernel
from belljar.jupyter.sessions import OpenSession, SessionKeeper, agents
from belljar.jupyter.specs import NAME

# ipykernel and traitlets are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


class KernelApplication(IPKernelApp):
    """ipykernel's application with a `BelljarKernel`; one in a process."""

    name = "belljar-kernel"
    kernel_class = Type(BelljarKernel)
    # No code of the user prints in this process, so its streams are not redirected.
    outstream_class = ""
    open_session: OpenSession

    def init_control(self, context: Any) -> None:
        """Handle requests in one thread: sessions run one cell at a time, so subshells would have nothing to do."""
        super().init_control(context)
        self.shell_channel_thread = None

    def init_signal(self) -> None:
        """Ignore SIGINT, because interrupts come as messages and Ctrl-C in a terminal must not end the kernel.

        `serve` handles SIGTERM.
        """
        signal.signal(signal.SIGINT, _ignore_signal)

    def init_kernel(self) -> None:
        """Give the kernel its session."""
        super().init_kernel()
        self.kernel.keeper = SessionKeeper(self.open_session)

    def write_connection_file(self, **kwargs: Any) -> None:
        """Write the connection file with a kernel name, because JupyterLab ignores a file without one."""
        super().write_connection_file(**kwargs)
        path = Path(self.abs_connection_file)
        content = json.loads(path.read_bytes())
        if not content.get("kernel_name"):
            path.write_text(json.dumps({**content, "kernel_name": NAME}, indent=2))

    def init_path(self) -> None:
        """Leave the import path alone, because ipykernel would put the working directory before everything else."""

    def init_pdb(self) -> None:
        """Do nothing, because no code of the user runs here."""

    def log_connection_info(self) -> None:
        """Note the ports, but do not print how to connect, which is left to whoever started the kernel."""
        self.parent_handle, parent = self.parent_handle or -1, self.parent_handle
        super().log_connection_info()
        self.parent_handle = parent


def _ignore_signal(_number: int, _frame: object) -> None:
    pass


def serve(arguments: Sequence[str], open_session: OpenSession, on_ready: Callable[[str], None] | None = None) -> None:
    """Run a kernel until a front end or a signal ends it; `on_ready` gets the path of the connection file."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    application: Any = KernelApplication.instance(log_level=logging.ERROR)
    application.open_session = open_session
    application.initialize([*arguments])
    loop = IOLoop.current()
    closing: list[asyncio.Task[None]] = []

    async def close() -> None:
        await application.kernel.aclose()
        loop.stop()

    def on_end() -> None:
        closing.append(asyncio.get_running_loop().create_task(close()))

    def set_up() -> None:
        running = asyncio.get_running_loop()
        running.add_signal_handler(signal.SIGTERM, on_end)
        if on_ready is not None:
            running.add_signal_handler(signal.SIGINT, on_end)
            on_ready(application.abs_connection_file)

    loop.add_callback(set_up)
    application.start()
    sys.stderr.flush()


# sun_path holds 108 bytes, the last of them a NUL; the sockets are named after the file, with a number.
_MAX_PATH_BYTES = 107 - len("-ipc-99")


def serve_existing(data_directory: Path, prefix: str, file: Path, transport: Literal["ipc", "tcp"]) -> None:
    """Serve an agent's live session until Ctrl-C, with `file` as connection file meanwhile."""
    session_id = asyncio.run(_check(data_directory, prefix))
    if file.exists():
        raise InvalidArgument(f"{file} exists already", hint="Name another file, or remove it if it is an old one")
    if not file.parent.is_dir():
        raise InvalidArgument(f"{file.parent} is not a folder", hint="Make it, or name another file")
    if transport == "ipc" and len(os.fsencode(file)) > _MAX_PATH_BYTES:
        raise InvalidArgument(
            f"{file} is too long a path for sockets beside it", hint="Name a shorter one, or use --transport tcp"
        )
    os.umask(0o077)  # so that only this user can use the sockets and read the key in the file
    serve(
        ["-f", str(file), f"--transport={transport}"],
        agents(data_directory, session_id),
        on_ready=lambda path: _say_ready(session_id, path),
    )


async def _check(data_directory: Path, prefix: str) -> str:
    """Return the whole id of the session, so that a wrong prefix is refused now and not by the first cell."""
    async with open_attachment(data_directory, prefix) as attached:
        return attached.session_id


def _say_ready(session_id: str, path: str) -> None:
    print(f"session {session_id} is served until Ctrl-C", file=sys.stderr)
    print(f"connect with: jupyter console --existing {path}", file=sys.stderr, flush=True)
    print(path, flush=True)
