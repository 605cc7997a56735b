"""Where host and kernel meet: a connection file and five socket names in the session's scratch folder.

Code of the session may write there: names are random and new for every kernel, and nothing is written through a link.
"""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path

# sun_path holds 108 bytes, the last of them a NUL.
_MAX_ADDRESS_BYTES = 107
_PORTS = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}


class Meeting:
    """The files of one kernel; `scratch` is the host's name of the folder, `inside` the session's."""

    def __init__(self, scratch: Path, inside: str) -> None:
        self._scratch = scratch
        self._inside = inside
        self._token = secrets.token_hex(4)
        self._detour: Path | None = None
        self.key = secrets.token_hex(32)

    @property
    def connection_file(self) -> str:
        """The connection file as the kernel sees it."""
        return f"{self._inside}/{self._token}.json"

    @property
    def inner_connection_file(self) -> str:
        """The connection file of a kernel behind a bridge, which writes it."""
        return f"{self._inside}/{self._token}-inner.json"

    def socket_path(self, channel: str) -> Path:
        """A channel's socket as the host sees it."""
        return self._scratch / f"{self._token}-{_PORTS[channel]}"

    def write(self) -> None:
        """Write the connection file."""
        told = {
            "transport": "ipc",
            "ip": f"{self._address_folder()}/{self._token}",
            "key": self.key,
            "signature_scheme": "hmac-sha256",
            **{f"{channel}_port": port for channel, port in _PORTS.items()},
        }
        descriptor = os.open(self._scratch / f"{self._token}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            folder = self._scratch.stat()
            if folder.st_uid != os.geteuid():
                os.fchown(descriptor, folder.st_uid, folder.st_gid)
            json.dump(told, file)

    def remove(self) -> None:
        """Remove what was written and what the kernel left; may be called twice."""
        files = (self._scratch / f"{self._token}{ending}.json" for ending in ("", "-inner"))
        for path in (*files, *map(self.socket_path, _PORTS)):
            with contextlib.suppress(OSError):
                path.unlink()
        if self._detour is not None:
            shutil.rmtree(self._detour, ignore_errors=True)

    def _address_folder(self) -> str:
        """The scratch folder under a name short enough for a socket's address, where the host's names hold inside."""
        longest = f"{self._inside}/{self._token}-{max(_PORTS.values())}"
        if len(os.fsencode(longest)) <= _MAX_ADDRESS_BYTES or self._inside != str(self._scratch):
            return self._inside
        self._detour = Path(tempfile.mkdtemp(prefix="belljar-", dir="/tmp"))
        (self._detour / "s").symlink_to(self._scratch)
        return str(self._detour / "s")
