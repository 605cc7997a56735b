"""The cell that a caller asks a session to run, and the checks that every surface and the Python API share."""

import math
import re
from dataclasses import dataclass

from belljar.errors import InvalidArgument
from belljar.outputs.terminal_text import printable
from belljar.settings import Settings

MAX_CLIENT_CHARS = 100
_FENCE = re.compile(r"\A\s*(?:```|~~~)[\w.+-]*[ \t]*\n(.*?)\n?(?:```|~~~)\s*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Cell:
    """The code that a caller wants run, with its limits and options."""

    code: str
    timeout_s: float
    allow_input: bool = False
    filename: str = ""
    author: str = ""
    """Who submitted it; empty for the session's owner."""
    client: str = ""
    """The name of the MCP client that it came through."""
    wants_value: bool = False
    """Whether its result is recorded as JSON too, for a workflow."""
    keeps_uris: bool = False
    """Whether data: URIs that it prints, and that its result has no room for, become files of the session."""
    keeps_figures: bool = False
    """Whether figures that it shows, and that its code does not save, become files of the session."""


def make_cell(
    settings: Settings,
    code: str,
    *,
    timeout_s: float | None = None,
    allow_input: bool = False,
    filename: str = "",
    author: str = "",
    client: str = "",
    wants_value: bool = False,
    keeps_uris: bool = False,
    keeps_figures: bool = False,
) -> Cell:
    """Return the cell for a caller's code, or refuse code and limits that the settings do not allow."""
    try:
        size = len(code.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"code has a lone surrogate at character {error.start}", hint="Write it as an escape in the code"
        ) from error
    if size > settings.max_code_bytes:
        raise InvalidArgument(
            f"code has {size:,} bytes, the limit is {settings.max_code_bytes:,}",
            hint="Upload data as a file and read it from the session folder",
        )
    code = stripped(code)
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise InvalidArgument(f"timeout_s is {timeout_s:g}", hint="Pass a number of seconds above 0")
    limit_s = settings.execution_timeout_s
    patience_s = min(timeout_s or limit_s, limit_s)
    return Cell(
        code,
        timeout_s=patience_s,
        allow_input=allow_input,
        filename=filename,
        author=author,
        client=(client if client.isprintable() else printable(client))[:MAX_CLIENT_CHARS],
        wants_value=wants_value,
        keeps_uris=keeps_uris,
        keeps_figures=keeps_figures,
    )


def stripped(code: str) -> str:
    """Return the code without the Markdown fence that models often put around it."""
    fenced = _FENCE.match(code)
    return fenced.group(1) if fenced else code
