"""Text that servers wrote, made fit to stand in source code and in front of a model.

What nobody can see is taken out: control characters could end a line of code, and invisible ones could say to a model
what a person does not read.
"""

import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"})


def visible(text: object, limit: int) -> str:
    """Lines of printable text, no longer than `limit`; anything that is no text is none."""
    if not isinstance(text, str):
        return ""
    lines = text[: 2 * limit].replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    shown = "".join(character for character in lines if character == "\n" or _is_shown(character))
    shown = "\n".join(line.rstrip() for line in shown.strip().split("\n"))
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def one_line(text: object, limit: int) -> str:
    """The same in one line."""
    line = " ".join(visible(text, 4 * limit).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def first_sentence(text: object, limit: int) -> str:
    """What a line of a list has room for."""
    line = one_line(text, 4 * limit)
    end = line.find(". ")
    return one_line(line[: end + 1] if end > 0 else line, limit)


def docstring(text: str, indent: str) -> str:
    """A docstring with exactly this text: nothing in it can end it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"') if '"""' in text or "\\" in text else text
    # A quote right before the closing ones would be one of them.
    escaped = f'{escaped[:-1]}\\"' if escaped.endswith('"') and not escaped.endswith('\\"') else escaped
    lines = escaped.split("\n")
    if len(lines) == 1:
        return f'{indent}"""{escaped}"""'
    body = [f"{indent}{line}" if line else "" for line in lines[1:]]
    return "\n".join([f'{indent}"""{lines[0]}', *body, f'{indent}"""'])


def _is_shown(character: str) -> bool:
    return (character.isascii() and character.isprintable()) or unicodedata.category(character) not in _HIDDEN
