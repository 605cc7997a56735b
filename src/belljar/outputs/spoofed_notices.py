"""Marks text of a session that looks like words of belljar's own, so that no reader takes it for them.

Notices of belljar stand in brackets among a cell's output, `[belljar: …]`, and a line of the same kind ends the text
that a model reads, `[ok | session_id: …]`. Code can print both. Whoever shows a session's text beside
notices passes the text, and only the text, through this module: `[belljar: …]` then reads `[printed: belljar: …]`.

Letters of other alphabets that look the same, invisible characters and colours between the letters do not help.
"""

import re
from collections.abc import Iterable

PRINTED = "printed: "
_BRACKETS = "\\[\uff3b\u3010\u3014\u3016\u27e6\u2045\u2772\ufe5d"
_COLONS = ":\uff1a\ufe55\u2236\ua789\ufe30\u02f8\u0589"
_DASHES = "\u2010-\u2015\u2212|>\u00bb;!"
# Characters that nobody sees between two letters, and colours. Bounded and possessive: a search takes linear time.
_UNSEEN = (
    "(?:[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff]|\x1b\\[[0-9;:]{0,16}m){0,8}+"
)
_SPACE = f"{_UNSEEN}[ \t\u00a0\u2000-\u200a\u202f\u205f\u3000]{{0,8}}+{_UNSEEN}"
# Each letter with those that most typefaces draw like it, full width included.
_LETTERS = (
    "bB\uff42\uff22\u0412\u0432\u0392\u042c\u044c\u13cf",
    "eE\uff45\uff25\u0435\u0415\u0395\u0451\u0401\u0454\u04bd\u212e",
    "lLiI1\uff4c\uff2c\uff29\u04cf\u04c0\u0406\u0456\u0399\u217c\u01c0|",
    "lLiI1\uff4c\uff2c\uff29\u04cf\u04c0\u0406\u0456\u0399\u217c\u01c0|",
    "jJ\uff4a\uff2a\u0458\u0408\u03f3\u037f",
    "aA\uff41\uff21\u0430\u0410\u0391\u03b1\u0251",
    "rR\uff52\uff32\u0433\u1d26\uab47\uab48",
)
_NAME = _UNSEEN.join(f"[{letters}]" for letters in _LETTERS)
_STATUSES = "ok|error|timeout|interrupted|out_of_memory|died|running|rejected"
_IMITATION = re.compile(
    f"[{_BRACKETS}](?![{_BRACKETS}])(?={_SPACE}(?:"
    # `[belljar: x`, `[belljar - x` and `[belljar] x`; neither a table of TOML nor a link of Markdown.
    f"{_NAME}{_SPACE}(?:[{_COLONS}{_DASHES}]|-[ \t]|\\][ \t]{{1,8}}\\w)"
    f"|(?:{_STATUSES}){_SPACE}\\|{_SPACE}(?:session|execution)_id"
    "))"
)
_LONGEST = 512
"""How long the beginning of an imitation can be, up to the character that makes it one."""
_STEP = 65_536
"""How much is searched at once, because other threads wait meanwhile: 1 ms, and 10 of text that is made for it."""


def disarmed(text: str) -> str:
    """Return text of a session in which what looks like a notice of belljar's says that it was printed."""
    parts: list[str] = []
    place = 0
    for start in range(0, len(text), _STEP):
        for found in _IMITATION.finditer(text, start, start + _STEP + _LONGEST):
            if found.start() < start + _STEP:
                parts += [text[place : found.end()], PRINTED]
                place = found.end()
    return "".join([*parts, text[place:]]) if parts else text


def disarmed_around(texts: Iterable[tuple[str, bool]]) -> str:
    """Return texts that are shown one after another as one; those with True are notices, and stay as they are.

    A notice that is split over several texts of the session is found too.
    """
    parts: list[str] = []
    run: list[str] = []
    for text, is_notice in texts:
        if not is_notice:
            run.append(text)
            continue
        parts += [disarmed("".join(run)), text]
        run = []
    return "".join([*parts, disarmed("".join(run))])


class StreamDisarmer:
    """Disarms text that is shown piece by piece, without holding any of it back."""

    def __init__(self) -> None:
        self._shown = ""
        """The end of what was shown so far, in which an imitation may have begun."""

    def feed(self, text: str) -> str:
        """Return the next piece as it should be shown."""
        before = len(self._shown)
        whole = self._shown + text
        parts: list[str] = []
        place = before
        for found in _IMITATION.finditer(whole):
            if found.start() >= before:
                parts += [whole[place : found.end()], PRINTED]
                place = found.end()
            elif self._is_new(found.start(), before):
                # Its beginning is on the screen already: the mark comes in the middle of the word.
                parts.append(f" ({PRINTED.strip(': ')}) ")
        self._shown = self._tail(whole)
        return "".join([*parts, whole[place:]])

    def notice(self) -> None:
        """Note that a notice of belljar's was shown, which ends whatever had begun before it."""
        self._shown = ""

    def _is_new(self, start: int, before: int) -> bool:
        """Return whether an imitation that began in an earlier piece became one only by the new piece."""
        return _IMITATION.match(self._shown[start:before]) is None

    @staticmethod
    def _tail(whole: str) -> str:
        start = max(0, len(whole) - _LONGEST)
        return whole[start:]
