"""The executions a session is made of, in order: what can be taken back, and what a caller means by "the last two"."""

from belljar.errors import NoCheckpoint
from belljar.sessions.journal import Journal

MOST_REMEMBERED = 1_000
# Of a number of executions; more would be an id, or meant to be a nuisance.
MOST_DIGITS = 9


class Timeline:
    """The last executions of one session that were not taken back."""

    def __init__(self, session_id: str, journal: Journal) -> None:
        self._session_id = session_id
        self._journal = journal
        self._ids: list[str] = []

    def restore(self) -> None:
        """As an earlier server left it."""
        self._ids = self._journal.timeline(self._session_id, MOST_REMEMBERED)

    @property
    def ids(self) -> tuple[str, ...]:
        """All of them, oldest first."""
        return tuple(self._ids)

    def add(self, execution_id: str) -> None:
        """Its turn has come. One that waits is not part of what can be taken back: it will run all the same."""
        self._ids.append(execution_id)
        del self._ids[:-MOST_REMEMBERED]

    def take_back(self, since: str) -> list[str]:
        """Put an execution and those after it on record as undone; returns them."""
        if since not in self._ids:
            return []
        place = self._ids.index(since)
        undone, self._ids = self._ids[place:], self._ids[:place]
        self._journal.undo(undone)
        return undone

    def target(self, to: str | int) -> str:
        """The execution that a caller means: by its id, or by the number of executions to take back."""
        if to in self._ids:  # looked up first: an id may consist of digits
            return str(to)
        if isinstance(to, int) or (to.isdecimal() and len(to) <= MOST_DIGITS):
            number = int(to)
            if not 0 < number <= len(self._ids):
                raise NoCheckpoint(
                    f"session {self._session_id} has {len(self._ids)} executions, {number} cannot be taken back",
                    hint="Pass 1 for the state before the last execution, or an execution_id",
                )
            return self._ids[-number]
        raise NoCheckpoint(
            f"execution {to[:64]!r} is none of session {self._session_id}, or was taken back",
            hint="Pass an execution_id that this session answered with, or 1 for its last one",
        )
