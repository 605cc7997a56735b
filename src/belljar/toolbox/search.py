"""Searches tools by words: BM25 over weighted fields (names, descriptions, parameters), with everyday synonyms.

To the scores of the words the similarities of `word_vectors.py` are added. An index is built from one catalogue. This
module does not know how results are shown.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, cast

from belljar.toolbox.base import Catalogue, ToolDefinition
from belljar.toolbox.server_text import first_sentence
from belljar.toolbox.synonyms import rephrased, split_words, stem, stemmed, synonyms
from belljar.toolbox.word_vectors import LEAST_SIMILAR, WEIGHT, word_vectors

DEFAULT_LIMIT: Final = 8
MAX_RESULTS: Final = 50
_QUERY_CHARACTERS: Final = 1_000
_QUERY_WORDS: Final = 32
"""Each word that is not known is compared with all names of tools, in case that it is misspelt."""
_DESCRIPTION_CHARACTERS: Final = 4_000
_SATURATION: Final = 1.0
_SYNONYM: Final = 0.7
_PART_OF_A_WORD: Final = 0.5
_SHORTEST_PART: Final = 4
_COVERAGE: Final = 0.6
"""The part of a score that depends on how much of the query was found."""
_NAME: Final = 0.5
"""The part of a score that depends on how much of the tool's name is in the query."""
_FIRST_CHARACTERS: Final = 200
_REST_CHARACTERS: Final = 1_500
_MISSPELT: Final = 0.4
_LEAST_ALIKE: Final = 0.55
_STOP: Final = (
    " a about again all an and another any are as at be by can could did do does for from get give happen happened has "
    "have here how i if in inside into is it its just know let like me more my need of off on once or our out please "
    "should show so some something take than that the their them then there these they thing things this those to tool "
    "tools two up use used want was we were what when where which who whole will with would you your "
)


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a tool's definition: the weight of a word in it, and how much the field's length reduces that."""

    weight: float
    length_share: float


# A name says more than a description, and a description's first sentence more than the rest. The server's name says
# little, because all tools of a server share it.
_FIELDS: Final = {
    "name": _Field(4.0, 0.5),
    "title": _Field(2.0, 0.5),
    "server": _Field(1.0, 0.0),
    "first": _Field(2.0, 0.4),
    "rest": _Field(0.6, 0.6),
    "parameters": _Field(0.8, 0.6),
    "parameter texts": _Field(0.3, 0.7),
}


_CASUAL: Final = frozenset({"rest", "parameter texts"})


def terms(text: str) -> list[str]:
    """Return the stems of a text's words; `getItem`, `get-item` and `get_item` are two words each."""
    return [stemmed(word) for word in split_words(text)]


class ToolIndex:
    """A search index of the tools of one catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._tools = catalogue.tools()
        counted = [_counted(tool) for tool in self._tools]
        means = {
            name: sum(fields[name].total() for fields in counted) / max(1, len(counted)) or 1.0 for name in _FIELDS
        }
        self._names = [{*fields["name"]} for fields in counted]
        self._spelled = [split_words(tool.name) for tool in self._tools]
        # For each stem the tools that have it, each with the stem's weight there.
        self._postings = _postings(counted, means, _FIELDS)
        # The same without the fields in which a word is often there by chance: there, no synonym is looked for.
        self._telling = _postings(counted, means, {name: _FIELDS[name] for name in _FIELDS if name not in _CASUAL})
        self._named_with: dict[str, list[int]] = {}
        for place, names in enumerate(self._names):
            for name in names:
                self._named_with.setdefault(name, []).append(place)
        self._rarities = {term: _rarity(len(found), len(counted)) for term, found in self._postings.items()}
        self._rarest = _rarity(0, len(counted))
        self._vectors = [word_vectors().of_tool(*_summary(tool)) for tool in self._tools]

    def search(self, query: str, *, server: str = "", limit: int = DEFAULT_LIMIT) -> list[ToolDefinition]:
        """Return the matching tools, the best first; if the query has no words, all tools in their order."""
        wanted = self._wanted(query[:_QUERY_CHARACTERS])
        places = [place for place, tool in enumerate(self._tools) if server in ("", tool.server)]
        most = max(1, min(limit, MAX_RESULTS))
        if not wanted:
            return [self._tools[place] for place in places[:most]]
        best = self._merged(query[:_QUERY_CHARACTERS], places, self._scores(wanted))
        return [self._tools[place] for place in best[:most]]

    def _merged(self, query: str, places: Sequence[int], scores: Mapping[int, float]) -> list[int]:
        """Return the tools ranked by both: the score by words, as a share of the best, and the similarity."""
        similar = word_vectors().similarities(query, [self._vectors[place] for place in places])
        top = max((scores.get(place, 0.0) for place in places), default=0.0) or 1.0
        both = {
            place: scores.get(place, 0.0) / top + WEIGHT * near
            for place, near in zip(places, similar, strict=True)
            if place in scores or near >= LEAST_SIMILAR
        }
        # Who asks for a tool by its name means that one.
        spelled = split_words(query)
        return sorted(both, key=lambda place: (self._spelled[place] != spelled, -both[place]))

    def _wanted(self, query: str) -> list[str]:
        """Return the stems of the meaningful words; of all words if none is.

        Two words that some tool writes as one, `on call` and `oncall`, also count as that one.
        """
        text = " ".join(split_words(query))
        words = [*dict.fromkeys(rephrased(text).split())][:_QUERY_WORDS]
        telling = [word for word in words if f" {word} " not in _STOP] or words
        pairs = pairwise(text.split()[:_QUERY_WORDS])
        joined = [one + other for one, other in pairs if stem(one + other) in self._postings]
        return [*dict.fromkeys(map(stemmed, (*telling, *joined)))]

    def _scores(self, wanted: Sequence[str]) -> dict[int, float]:
        """Return the scores of the tools that the query's words find: BM25 over weighted fields.

        A tool that has all of the words scores higher than one that has one of them everywhere.
        """
        parts = {term: self._parts(term) for term in wanted}
        meant = {*wanted}.union(*(synonyms().get(term, ()) for term in wanted))
        all_rarity = sum(map(self._rarity, wanted))
        scores: dict[int, float] = {}
        for place in set[int]().union(*parts.values()):
            found = [(part[place], term) for term, part in parts.items() if place in part]
            covered = sum(self._rarity(term) for _, term in found) / all_rarity
            score = sum(part for part, _ in found) * (1 - _COVERAGE + _COVERAGE * covered)
            scores[place] = score * (1 - _NAME + _NAME * self._named(place, meant))
        return scores

    def _named(self, place: int, meant: set[str]) -> float:
        """Return how much of a tool's name is in the query, so that `create_card` goes before `create_card_label`."""
        names = self._names[place]
        return len(names & meant) / max(1, len(names))

    def _parts(self, term: str) -> dict[int, float]:
        """Return what one word of the query adds to the score of each tool: by itself, or by what it may stand for."""
        rarity = self._rarity(term)
        found = {place: rarity * weight for place, weight in self._postings.get(term, {}).items()}
        own = {*found}
        for other in synonyms().get(term, ()):
            # A synonym counts no more than the word of the query would, however rare the synonym is.
            factor = _SYNONYM * min(rarity, self._rarity(other))
            for place, weight in self._telling.get(other, {}).items():
                found[place] = max(found.get(place, 0.0), factor * weight)
        for other, likeness in self._alike(term):
            factor = likeness * min(rarity, self._rarity(other))
            for place in self._named_with[other]:
                if place not in own:
                    found[place] = max(found.get(place, 0.0), factor * self._postings[other][place])
        return found

    def _alike(self, term: str) -> list[tuple[str, float]]:
        """Return words of tools' names that begin like the term: `screen` finds `screenshot`.

        If nothing has the term or a synonym of it, it may be misspelt, and words that share most of its letters count.
        """
        if len(term) < _SHORTEST_PART:
            return []
        long_names = [name for name in self._named_with if len(name) >= _SHORTEST_PART and name != term]
        found = [(name, _PART_OF_A_WORD) for name in long_names if name.startswith(term) or term.startswith(name)]
        if found or term in self._postings or not synonyms().get(term, frozenset()).isdisjoint(self._postings):
            return found
        pairs = _letter_pairs(term)
        likeness = [(name, _dice(pairs, _letter_pairs(name))) for name in long_names]
        return [(name, _MISSPELT * like) for name, like in likeness if like >= _LEAST_ALIKE]

    def _rarity(self, term: str) -> float:
        return self._rarities.get(term, self._rarest)


@lru_cache(maxsize=20_000)
def _letter_pairs(word: str) -> frozenset[str]:
    return frozenset(map("".join, pairwise(f"^{word}$")))


def _dice(one: frozenset[str], other: frozenset[str]) -> float:
    return 2 * len(one & other) / (len(one) + len(other))


def _summary(tool: ToolDefinition) -> tuple[str, str]:
    """Return the texts that a tool's vector is made of: its names, and the beginning of its description."""
    return f"{tool.server} {tool.name}", tool.description[:_FIRST_CHARACTERS]


def _rarity(spread: int, count: int) -> float:
    return math.log(1 + (count - spread + 0.5) / (spread + 0.5))


def _counted(tool: ToolDefinition) -> dict[str, Counter[str]]:
    """Return how often each word occurs in each field."""
    about = tool.description[:_DESCRIPTION_CHARACTERS]
    first = first_sentence(about, _FIRST_CHARACTERS)
    texts: dict[str, list[str]] = {
        "name": [tool.name],
        "title": [tool.title],
        "server": [tool.server],
        "first": [first],
        "rest": [about[len(first) :][:_REST_CHARACTERS]],
        "parameters": [],
        "parameter texts": [],
    }
    for name, schema in _properties(tool).items():
        texts["parameters"].append(name)
        if isinstance(schema, dict):
            description = cast("dict[str, Any]", schema).get("description")
            texts["parameter texts"].append(description[:_FIRST_CHARACTERS] if isinstance(description, str) else "")
    return {field: Counter(term for text in listed for term in terms(text)) for field, listed in texts.items()}


def _postings(
    counted: Sequence[Mapping[str, Counter[str]]], means: Mapping[str, float], fields: Mapping[str, _Field]
) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for place, words in enumerate(counted):
        for term, weight in _weights(words, means, fields).items():
            found.setdefault(term, {})[place] = weight * (_SATURATION + 1) / (weight + _SATURATION)
    return found


def _weights(
    words: Mapping[str, Counter[str]], means: Mapping[str, float], fields: Mapping[str, _Field]
) -> Mapping[str, float]:
    """Return the weight of each word over all fields; in a longer field each word counts less."""
    found: dict[str, float] = {}
    for name, field in fields.items():
        length = 1 - field.length_share + field.length_share * words[name].total() / means[name]
        for term, count in words[name].items():
            found[term] = found.get(term, 0.0) + field.weight * count / length
    return found


def _properties(tool: ToolDefinition) -> dict[str, Any]:
    properties = tool.input_schema.get("properties")
    return cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
