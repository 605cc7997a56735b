"""A server's question, put to whoever is at the terminal: field by field, on stderr, with the answers from stdin."""

import asyncio
import os
import sys
from typing import Any, cast

from belljar.cli.streams import one_line
from belljar.cli.terminal import StandardInput
from belljar.toolbox.base import Question, Reply

_YES = ("y", "yes", "true", "1")
_NO = ("n", "no", "false", "0")


async def ask_at_terminal(question: Question) -> Reply:
    """What the person says; an empty line leaves a field out, the end of the input cancels."""
    if not os.isatty(0):
        print(f"The server asks: {one_line(question.message)} (nobody is at the terminal)", file=sys.stderr)
        return Reply("cancel")
    lines = StandardInput()
    await _say(f"The server asks: {one_line(question.message)}")
    if question.url:
        await _say(f"Open {one_line(question.url)}")
    properties = cast("dict[str, dict[str, Any]]", question.schema.get("properties", {}))
    if not properties:
        return Reply("accept") if (await _answer(lines, "Go on? [y/n]") or "").lower() in _YES else Reply("decline")
    values: dict[str, Any] = {}
    for name, schema in properties.items():
        asked = f"{schema.get('title') or name} ({schema.get('type', 'text')}):"
        text = await _answer(lines, one_line(asked))
        if text is None:
            return Reply("cancel")
        if text:
            values[name] = _value(text, schema)
    return Reply("accept", values)


def _value(text: str, schema: dict[str, Any]) -> Any:
    """As the field wants it; what it does not want is the server's to refuse."""
    kind = schema.get("type")
    try:
        if kind in ("integer", "number"):
            return int(text) if kind == "integer" else float(text)
    except ValueError:
        return text
    if kind == "boolean" and text.lower() in (*_YES, *_NO):
        return text.lower() in _YES
    return text


async def _answer(lines: StandardInput, prompt: str) -> str | None:
    await _say(prompt, end=" ")
    return await lines.answer(prompt)


async def _say(text: str, end: str = "\n") -> None:
    await asyncio.to_thread(print, text, end=end, file=sys.stderr, flush=True)
