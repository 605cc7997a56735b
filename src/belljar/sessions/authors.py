"""Whose cells they are, where people share a session: told beside the cell, and to the owner once."""

MOST_REMEMBERED = 1_000


class Authors:
    """Those who ran cells in one session since the owner's last one."""

    def __init__(self) -> None:
        self._names: list[str] = []
        """One for each cell."""
        self._users: dict[str, None] = {}
        """Of widgets, in order."""

    def use(self, author: str) -> None:
        """Someone who is not the owner did something to a widget."""
        if author:
            self._users[author] = None

    def begin(self, author: str) -> str:
        """A cell begins, the owner's if no author is named; returns what is to be said of it, if anything."""
        if author:
            self._names.append(author)
            del self._names[:-MOST_REMEMBERED]
            return f"run by {author}, who shares this session"
        names, self._names, users, self._users = self._names, [], self._users, {}
        cells = "a cell" if len(names) == 1 else f"{len(names)} cells"
        runners, movers = " and ".join(dict.fromkeys(names)), " and ".join(users)
        said = [f"{runners} ran {cells}"] if names else []
        said += ["used widgets" if movers == runners else f"{movers} used widgets"] if users else []
        return f"{' and '.join(said)} in this session since your last one" if said else ""
