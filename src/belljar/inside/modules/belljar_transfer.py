"""Files in and out of this session by URL: the host moves them, because the session has no network of its own.

    from belljar_transfer import fetch, send
    fetch("https://account.blob.core.windows.net/in/table.csv?sig=…", "table.csv")
    send("result.csv", "https://account.blob.core.windows.net/out/result.csv?sig=…")

`fetch` also takes data: URLs. Names are paths in /mnt/data. Only hosts that the server's setting `egress` allows are
reached; signatures in URLs are in no log.
"""

import base64
import binascii
import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

__all__ = ["TransferError", "fetch", "send"]

VARIABLE = "BELLJAR_TRANSFERS"
_ROOT = "/mnt/data/"
# Resolved at import, because a cell may have changed its working directory by the time it moves a file.
_FOLDER = Path.cwd()


class TransferError(OSError):
    """Raised when a file was not moved; the message says why and what to do."""


def fetch(url: str, name: str) -> Path:
    """Save what a data: or https: URL has under a name in /mnt/data, and return its path."""
    place = _place(name)
    if url[:5].lower() == "data:":
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(_decoded(url))
    else:
        _ask("fetch", url, name)
    return place


def send(name: str, url: str) -> int:
    """Send a file of /mnt/data to an https: URL that may be written, by PUT; return how many bytes were sent."""
    place = _place(name)
    if not place.is_file():
        raise FileNotFoundError(f"there is no file {name!r} to send")
    return _ask("send", url, name)


def _place(name: str) -> Path:
    return _FOLDER / os.fspath(name).replace(_ROOT, "", 1) if os.fspath(name).startswith(_ROOT) else _FOLDER / name


def _decoded(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise TransferError("the data: URL has no comma: write data:[type][;base64],content")
    content = unquote_to_bytes(body)
    if not head.lower().endswith(";base64"):
        return content
    try:
        return base64.b64decode(b"".join(content.split()), validate=True)
    except (binascii.Error, ValueError):
        raise TransferError("the data: URL has no valid base64") from None


def _ask(action: str, url: str, name: str) -> int:
    if VARIABLE not in os.environ:
        raise TransferError("this session cannot move files by URL: the server's setting egress allows no host")
    answer = _answer({"action": action, "url": url, "name": os.fspath(name)})
    if answer["error"]:
        raise TransferError(answer["error"])
    return int(answer["size"])


def _answer(request: "dict[str, Any]") -> "dict[str, Any]":
    folder, name = os.path.split(os.environ[VARIABLE])
    here = os.open(".", os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            os.chdir(folder)  # because a UNIX socket's address holds 107 bytes, and the folder's path may be longer
            try:
                sock.connect(name)
            finally:
                os.fchdir(here)
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as answer:
                return json.loads(answer.read())
    except (OSError, ValueError) as error:
        raise TransferError(f"the host did not answer: {type(error).__name__}") from None
    finally:
        os.close(here)
