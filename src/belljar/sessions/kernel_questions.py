"""Questions to a session's kernel that a person waits for: completions, help, a look at its variables.

They take the session's turn, as a cell does, and are given up rather than made to wait for a cell. A look at variables
starts no kernel, and is no use of the session: its lease does not notice. What is told passes the session's screens, as
its output does, so that personal data and what the policy hides stay hidden.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final, Literal, TypeVar, cast

from belljar.errors import KernelDied
from belljar.kernels.base import Kernel
from belljar.kernels.variables import ColumnSummary, TablePage, TablePart, VariableKernel, VariableListing
from belljar.outputs.events import DisplayData
from belljar.privacy.detectors import LONGEST_CHARS
from belljar.sessions.session import Session

SHOWN_CHARS: Final = 200
_TEXTS: Final = "application/json"
_Answer = TypeVar("_Answer")
# A completion that is a second late is too late, because the person has typed on. A checkpoint that is taken between
# two cells is over by then.
TURN_TIMEOUT_S: Final = 1.0


@asynccontextmanager
async def kernel_between_cells(session: Session) -> AsyncGenerator[Kernel | Literal["busy", "not started"]]:
    """Hold the session's turn while its kernel is asked; yields why not when it runs a cell or has no kernel."""
    if session.is_busy:
        yield "busy"
        return
    try:
        async with asyncio.timeout(TURN_TIMEOUT_S):
            await session.turn.acquire()
    except TimeoutError:
        yield "busy"
        return
    try:
        kernel = session.session_kernel.kernel
        yield kernel if kernel is not None and kernel.is_alive() else "not started"
    finally:
        session.turn.release()


async def ask_between_cells(session: Session, ask: Callable[[Kernel], Awaitable[_Answer]]) -> _Answer | None:
    """Return the kernel's answer; None when the session is busy, or has no kernel, or that dies meanwhile."""
    try:
        async with kernel_between_cells(session) as kernel:
            return None if isinstance(kernel, str) else await ask(kernel)
    except KernelDied:
        return None


# Variables

NoLook = Literal["busy", "not started", "names only", "withheld"]
"""Why a kernel told nothing: a cell runs, there is none yet, it cannot tell, or a rule for output withholds it."""
NoRows = NoLook | Literal["no filter"]
"""Why it told no rows; `no filter`: whether a row fits could tell what the screens hide."""


async def look_at_variables(session: Session, offset: int, limit: int) -> VariableListing | NoLook:
    """Return some of the session's variables, or why there is nothing to tell."""
    async with _variable_kernel(session) as kernel:
        if isinstance(kernel, str):
            return kernel
        found = await _ask_kernel(session, kernel.variables(offset, limit, _asked_chars(session)))
    if found is None:
        return "busy"
    texts = [text for item in found.items for text in (item.name, item.type, item.value or "")]
    screened = await _screen(session, texts)
    if screened is None:
        return "withheld"
    for place, item in enumerate(found.items):
        name, kind, value = screened[3 * place : 3 * place + 3]
        item.name, item.type = name[:SHOWN_CHARS], kind[:SHOWN_CHARS]
        item.is_cut = item.is_cut or len(value) > SHOWN_CHARS
        item.value = None if item.value is None else value[:SHOWN_CHARS]
    return found


async def look_at_rows(session: Session, name: str, part: TablePart) -> TablePage | NoRows:
    """Return some rows of a variable, or why there is nothing to tell."""
    if part.where is not None and not session.screens().is_empty:
        return "no filter"
    async with _variable_kernel(session) as kernel:
        if isinstance(kernel, str):
            return kernel
        page = await _ask_kernel(session, kernel.rows(name, replace(part, chars=_asked_chars(session))))
    if page is None:
        return "busy"
    names = [column.name for column in page.columns]
    cells = [text for row in page.rows for text in row if text is not None]
    told = [text for column in page.columns for text in _summary_texts(column.summary)]
    screened = await _screen(session, [page.kind, page.reason, *told, *names, *page.labels, *cells])
    if screened is None:
        return "withheld"
    page.kind, page.reason, *rest = screened
    told, rest = iter(rest[: len(told)]), rest[len(told) :]
    for column in page.columns:
        _rewrite(column.summary, told)
    for column, label in zip(page.columns, rest, strict=False):
        column.name = _cut(label)
    rest = rest[len(names) :]
    page.labels = [_cut(label) for label in rest[: len(page.labels)]]
    texts = iter(rest[len(page.labels) :])
    page.rows = [[None if text is None else _cut(next(texts)) for text in row] for row in page.rows]
    return page


def _summary_texts(summary: ColumnSummary | None) -> list[str]:
    return [summary.least, summary.most, *(one.text for one in summary.frequent)] if summary is not None else []


def _rewrite(summary: ColumnSummary | None, texts: Iterator[str]) -> None:
    """Put texts, as the screens let them pass, where `_summary_texts` took them from."""
    if summary is not None:
        summary.least, summary.most = _cut(next(texts)), _cut(next(texts))
        for one in summary.frequent:
            one.text = _cut(next(texts))


@asynccontextmanager
async def _variable_kernel(session: Session) -> AsyncGenerator[VariableKernel | NoLook]:
    """Take the session's turn for a question to its kernel, or give the reason why it cannot be asked."""
    async with kernel_between_cells(session) as kernel:
        yield kernel if isinstance(kernel, str | VariableKernel) else "names only"


async def _ask_kernel(session: Session, asked: Awaitable[_Answer | None]) -> _Answer | None:
    """Return the kernel's answer; None when it has died meanwhile. The next cell reports that, and why."""
    try:
        return await asked
    except KernelDied as death:
        session.session_kernel.ended_by = death.message
        return None


def _asked_chars(session: Session) -> int:
    """Return how much of each text is asked for: enough behind the cut to find what the screens look for."""
    return SHOWN_CHARS if session.screens().is_empty else SHOWN_CHARS + LONGEST_CHARS


async def _screen(session: Session, texts: Sequence[str]) -> list[str] | None:
    """Return texts as the session's screens let them pass, in the same order; None if they are withheld."""
    screens = session.screens()
    if screens.is_empty:
        return [*texts]
    passed = [*await screens.apply(DisplayData({_TEXTS: [*texts]})), *screens.flush()]
    shown = next((event.data.get(_TEXTS) for event in passed if isinstance(event, DisplayData)), None)
    if not isinstance(shown, list) or len(shown) != len(texts) or not all(isinstance(text, str) for text in shown):
        return None
    return cast("list[str]", shown)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
