"""Finding tools by words: BM25 over their names, parameters and descriptions, with stemming and a few synonyms.

Built from a catalogue and as good as it; knows nothing of how what it finds is shown.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, cast

from belljar.toolbox.base import Catalogue, ToolDefinition
from belljar.toolbox.stems import stem

DEFAULT_LIMIT: Final = 8
MOST_RESULTS: Final = 50
_QUERY_CHARACTERS: Final = 1_000
_DESCRIPTION_CHARACTERS: Final = 4_000
_WORD: Final = re.compile(r"[^\W_]+")
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SATURATION, _LENGTH_SHARE = 1.2, 0.6
# A name says more than a description, and every tool of a server has the server's name.
_NAME, _TITLE, _SERVER, _DESCRIPTION, _PARAMETER, _PARAMETER_TEXT = 3.0, 2.0, 1.0, 1.0, 1.0, 0.4
_SYNONYM: Final = 0.7
_ASIDE: Final = 0.3
_STOP: Final = (
    " a about all an and any are as at be by can do for from get give how i in into is it its me my of on once or our "
    "out please show some someone something that the their them there this to tool tools use want what when where "
    "which who whole with you your "
)
# Words that people use for what tools call otherwise; each finds the others of its group.
_GROUPS: Final = (
    "history log",
    "recent latest last log",
    "change modification edit diff",
    "uncommitted unstaged pending",
    "undo revert reset restore unstage",
    "remove delete drop erase forget",
    "make create add new insert",
    "find search query lookup",
    "folder directory dir",
    "file document",
    "read view open load cat",
    "write save store put",
    "run execute call",
    "web url http internet website page",
    "fetch download retrieve",
    "list enumerate ls",
    "move rename",
    "tree structure hierarchy recursive",
    "several multiple many",
    "replace substitute edit",
    "message mail email",
    "picture image photo",
    "table sql database db",
    "time clock date timezone",
    "remember memory knowledge",
    "think reason",
    "repo repository",
    "ticket issue bug",
)
# Whoever says the first may mean the second, and not the other way round.
_ALSO: Final = (("change", "commit"),)


@cache
def _synonyms() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for group in _GROUPS:
        stems = {stem(word) for word in group.split()}
        for one in stems:
            found.setdefault(one, set()).update(stems - {one})
    for said, meant in _ALSO:
        found.setdefault(stem(said), set()).add(stem(meant))
    return {one: frozenset(others) for one, others in found.items()}


def terms(text: str) -> list[str]:
    """The stems of the words of a text; `getItem`, `get-item` and `get_item` are two words each."""
    words = (part.lower() for word in _WORD.findall(text) for part in _HUMP.split(word))
    return [stem(word) for word in words]


class Index:
    """The tools of one catalogue, to be searched often."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._tools = catalogue.tools()
        self._weights = [_weights(tool) for tool in self._tools]
        self._lengths = [sum(weights.values()) for weights in self._weights]
        self._mean = sum(self._lengths) / len(self._lengths) if self._lengths else 1.0
        self._spread = Counter(term for weights in self._weights for term in weights)

    def search(self, query: str, *, server: str = "", limit: int = DEFAULT_LIMIT) -> list[ToolDefinition]:
        """The best first; without any word to go by, all of them in their order."""
        wanted, asides = _wanted(query[:_QUERY_CHARACTERS])
        places = [place for place, tool in enumerate(self._tools) if server in ("", tool.server)]
        most = max(1, min(limit, MOST_RESULTS))
        if not wanted:
            return [self._tools[place] for place in places[:most]]
        scores = {place: self._score(place, wanted, asides) for place in places}
        best = sorted((place for place in places if scores[place] > 0), key=lambda place: -scores[place])
        return [self._tools[place] for place in best[:most]]

    def _score(self, place: int, wanted: Iterable[str], asides: Iterable[str]) -> float:
        """BM25, times the share of the words that were found: a tool that fits all of them goes before one that has
        one of them everywhere. Asides find nothing by themselves."""
        parts = [self._part(place, term) for term in wanted]
        found = sum(parts) * sum(1 for part in parts if part > 0) / len(parts)
        return found and found + _ASIDE * sum(self._rarity(term) * self._weight(place, term) for term in asides)

    def _part(self, place: int, term: str) -> float:
        rarity = self._rarity(term)
        own = rarity * self._weight(place, term)
        # A word that stands for another says no more than that would, however rare it is itself.
        others = (
            _SYNONYM * min(rarity, self._rarity(other)) * self._weight(place, other)
            for other in _synonyms().get(term, ())
        )
        return max((own, *others))

    def _rarity(self, term: str) -> float:
        count, spread = len(self._tools), self._spread[term]
        return math.log(1 + (count - spread + 0.5) / (spread + 0.5))

    def _weight(self, place: int, term: str) -> float:
        weight = self._weights[place].get(term, 0.0)
        if not weight:
            return 0.0
        length = 1 - _LENGTH_SHARE + _LENGTH_SHARE * self._lengths[place] / self._mean
        return weight * (_SATURATION + 1) / (weight + _SATURATION * length)


def _wanted(query: str) -> tuple[list[str], list[str]]:
    """The words that say something, all of them where none does; and the others, which a tool may be named after."""
    words = [*dict.fromkeys(part.lower() for word in _WORD.findall(query) for part in _HUMP.split(word))]
    telling = [word for word in words if f" {word} " not in _STOP] or words
    asides = [word for word in words if word not in telling and len(word) > 2]
    return [*dict.fromkeys(map(stem, telling))], [*dict.fromkeys(map(stem, asides))]


def _weights(tool: ToolDefinition) -> Mapping[str, float]:
    found: Counter[str] = Counter()

    def add(text: object, weight: float) -> None:
        if isinstance(text, str):
            for term in terms(text[:_DESCRIPTION_CHARACTERS]):
                found[term] += weight  # type: ignore[assignment]

    add(tool.name, _NAME)
    add(tool.title, _TITLE)
    add(tool.server, _SERVER)
    add(tool.description, _DESCRIPTION)
    for name, schema in _properties(tool).items():
        add(name, _PARAMETER)
        if isinstance(schema, dict):
            add(cast("dict[str, Any]", schema).get("description"), _PARAMETER_TEXT)
    return found


def _properties(tool: ToolDefinition) -> dict[str, Any]:
    properties = tool.input_schema.get("properties")
    return cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
