"""What a runner may say at which point. Its process also runs the session's code, which can write to the same socket.

A message that no runner of ours sends at that point was written by the session's code: the peer is cut off, as it is
for a message without form. Knows the requests by their numbers alone.
"""

from collections import deque

from belljar.errors import KernelDied
from belljar.kernels import messages

# Threads and tasks of earlier cells may show something at any time, under the number of their cell or of none.
_OUTPUT = (messages.Display, messages.Clear, messages.Result, messages.Error, messages.Comm)
_OF_A_CELL = (messages.Sync, messages.Input, messages.Done)
# Requests that nobody waited for to the end: a name that took too long to look at, a copy that took too long to make.
MOST_ABANDONED = 100


class Protocol:
    """One runner's side of the talk, as far as the host has to know it."""

    def __init__(self) -> None:
        self._request: int | None = None
        self._answer: type[messages.Base] | None = None
        self._may_ask = False
        self._abandoned: deque[int] = deque(maxlen=MOST_ABANDONED)

    def begin_cell(self, request: int, *, allow_input: bool) -> None:
        """A cell is about to be sent, or a front end's word to a widget, which runs as one."""
        self._begin(request)
        self._may_ask = allow_input

    def begin_question(self, request: int, answer: type[messages.Base]) -> None:
        """A request is about to be sent, to which there is one answer."""
        self._begin(request)
        self._answer = answer

    def _begin(self, request: int) -> None:
        if self._request is not None:
            self._abandoned.append(self._request)
        self._request, self._answer, self._may_ask = request, None, False

    def check(self, message: messages.Message) -> None:
        """Refuse a message that is not due: KernelDied. The one that ends a request is accepted once."""
        if isinstance(message, _OUTPUT) or message.id in self._abandoned:
            return
        if message.id is None or message.id != self._request:
            raise KernelDied(f"the kernel sent the message {message.type!r}, which nobody had asked for")
        if self._answer is not None:
            # Saving variables and looking at names runs code of the session's, whose output is kept in order.
            is_due = isinstance(message, (self._answer, messages.Sync))
        else:
            is_due = isinstance(message, _OF_A_CELL)
        check_question(message, may_ask=self._may_ask)
        if not is_due:
            raise KernelDied(f"the kernel sent the message {message.type!r}, which was not due")
        if isinstance(message, self._answer or messages.Done):
            self._request = self._answer = None
            self._may_ask = False


def check_question(message: object, *, may_ask: bool) -> None:
    """Refuse a question of an execution that may have none: KernelDied. A question stops the clock."""
    if isinstance(message, messages.Input) and not may_ask:
        raise KernelDied("the kernel asked for input, which this execution does not allow")
