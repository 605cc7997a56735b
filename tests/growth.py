"""Whether work on hostile text stays linear: twice the text may take no more than three times as long.

Measured in processor time, so that a busy machine makes no difference, and compared only above a floor.
"""

import time
from collections.abc import Callable
from typing import TypeVar

TIMES = 3
"""The most that twice the text may take, as a multiple."""
_FLOOR_S = 0.005
_LONGEST_CHARS = 16_384
Text = TypeVar("Text", str, bytes)


def growth(work: Callable[[Text], object], text: Callable[[int], Text], longest: int = _LONGEST_CHARS) -> float:
    """Return how many times as long `work` takes for twice the text; 1 where no text up to `longest` takes any time."""
    count, taken = 16, 0.0
    while len(text(count)) < longest:
        count *= 2
        before, taken = taken, _taken(work, text(count))
        if taken > _FLOOR_S and taken > TIMES * before:
            # Something else may have taken that long, but not at two lengths, three times each.
            half, whole, double = (min(_taken(work, text(n)) for _ in range(3)) for n in (count // 2, count, 2 * count))
            if (factor := min(whole / half, double / whole)) > TIMES:
                return factor
    return 1.0


def _taken(work: Callable[[Text], object], text: Text) -> float:
    began = time.thread_time()
    work(text)
    return time.thread_time() - began
