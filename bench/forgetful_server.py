"""`belljar` with a journal that keeps nothing: a call as it would be if durability cost nothing."""

from belljar.cli import main
from belljar.journal.journal import Journal


def _forget(*_: object, **__: object) -> int:
    return 0


for name in ("begin", "start", "append", "finish", "write", "commit"):
    setattr(Journal, name, _forget)

if __name__ == "__main__":
    main()
