"""What can go wrong on the way to a server, as codes that travel through the SDK like a server's own errors do.

JSON-RPC leaves -32000 to -32099 to implementations; a server that used ours would only say that it failed.
"""

from typing import Final, cast

from mcp.shared.exceptions import MCPError
from mcp.types import CONNECTION_CLOSED

UNREACHABLE: Final = -32_096
SESSION_GONE: Final = -32_097
TOO_LARGE: Final = -32_098

_OURS: Final = (UNREACHABLE, SESSION_GONE, TOO_LARGE)
# Many servers use the code of a closed connection for errors of their own; these are the SDK's words for it.
_CLOSED: Final = ("Connection closed", "SSE stream ")
_MESSAGE_CHARACTERS: Final = 2_000


def is_on_the_way(error: MCPError) -> bool:
    """Whether the call got lost, rather than being answered with an error."""
    return error.code in _OURS or (error.code == CONNECTION_CLOSED and error.message.startswith(_CLOSED))


def words(error: BaseException) -> str:
    """What an error says, bounded and on one line: some of it is a server's."""
    error = _innermost(error)
    text = error.message if isinstance(error, MCPError) else str(error) or type(error).__name__
    shown = "".join(character if character.isprintable() else " " for character in text[:_MESSAGE_CHARACTERS])
    return " ".join(shown.split())


def detail(error: BaseException) -> str:
    """What only the operator should read of an error of ours."""
    error = _innermost(error)
    said: object = error.data if isinstance(error, MCPError) and error.code in _OURS else ""
    return said[:_MESSAGE_CHARACTERS] if isinstance(said, str) else ""


def code(error: BaseException) -> int:
    """The protocol's code of an error; 0 where it has none."""
    error = _innermost(error)
    return error.code if isinstance(error, MCPError) else 0


def _innermost(error: BaseException) -> BaseException:
    """The first of those that a group of tasks raised."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
