"""Whose cells they are, where people share a session: told beside the cell, and to the owner once."""

MOST_REMEMBERED = 1_000


class Authors:
    """Those who ran cells in one session since the owner's last one."""

    def __init__(self) -> None:
        self._names: list[str] = []
        """One for each cell."""

    def begin(self, author: str) -> str:
        """A cell begins, the owner's if no author is named; returns what is to be said of it, if anything."""
        if author:
            self._names.append(author)
            del self._names[:-MOST_REMEMBERED]
            return f"run by {author}, who shares this session"
        names, self._names = self._names, []
        if not names:
            return ""
        cells = "a cell" if len(names) == 1 else f"{len(names)} cells"
        return f"{' and '.join(dict.fromkeys(names))} ran {cells} in this session since your last one"
