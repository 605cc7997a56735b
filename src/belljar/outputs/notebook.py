"""A session's executions as a notebook that Jupyter opens."""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from belljar.models import ExecutionResult, OutputEvent
from belljar.outputs.budget import within_budget
from belljar.outputs.events import Notice
from belljar.outputs.forms import ReadDisplay, display_id_of, error_fields, mime_bundle
from belljar.outputs.spoofed_notices import disarmed_around
from belljar.outputs.terminal_text import LineFolder

Shown = dict[str, list[Any]]
UNDONE = "undone"
# nbclient skips cells with this tag when it runs a notebook.
SKIPPED = "skip-execution"
UNDONE_COMMENT = "# Undone: the session was rewound to before this cell."
BROKEN_OFF = ("timeout", "interrupted", "died", "out_of_memory", "rejected")


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """One execution, undone when its session was rewound to before it; or an installation that a caller asked for."""

    code: str
    result: ExecutionResult | None
    events: Iterable[OutputEvent]
    is_undone: bool = False
    why_no_result: str = ""
    """Why the execution has no result; empty when it has one."""
    is_install: bool = False
    """Whether the session ran no such code: it stands for packages that were installed otherwise."""


def notebook_of(
    session_id: str,
    cells: Iterable[NotebookCell],
    read_display: ReadDisplay,
    *,
    kernel: str = "",
    limit_chars: int = 0,
) -> Any:
    """Return the notebook; `kernel` names a Jupyter kernel, `limit_chars` limits the text of a cell, 0 is no limit."""
    v4 = _nbformat().v4
    python = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata: dict[str, Any] = {
        "kernelspec": {"name": kernel, "display_name": kernel} if kernel else python,
        "belljar": {"session_id": session_id},
    }
    if not kernel:
        metadata["language_info"] = {"name": "python"}
    notebook = v4.new_notebook(metadata=metadata)
    shown: Shown = {}
    for number, ran in enumerate(cells, start=1):
        if ran.is_install:
            notes = {"belljar": {"status": "ok", "install": True}}
            notebook.cells.append(v4.new_code_cell(ran.code, id=f"install-{number}", metadata=notes))
        else:
            notebook.cells.append(_cell(v4, ran, cell_outputs(ran, read_display, shown, limit_chars=limit_chars)))
    return notebook


def is_install(cell: Any) -> bool:
    """Return whether a cell of a notebook stands for an installation that no execution made."""
    return bool(cell.metadata.get("belljar", {}).get("install"))


def execution_count(notebook: Any) -> int:
    """Return how many executions a notebook has."""
    return sum(not is_install(cell) for cell in notebook.cells)


def written(notebook: Any) -> str:
    """Return a notebook as text that can be encoded, although cells may show lone surrogates."""
    return str(_nbformat().writes(notebook)).encode(errors="replace").decode()


def cell_outputs(ran: NotebookCell, read_display: ReadDisplay, shown: Shown, *, limit_chars: int = 0) -> list[Any]:
    """Return what a cell showed; `shown` has the displays of earlier cells, which it may update, by their id."""
    v4 = _nbformat().v4
    outputs = _Outputs(v4, ran.result, read_display, shown, limit_chars)
    for event in within_budget(_folded(ran.events), limit_chars):
        outputs.add(event)
    return [*outputs.whole(), *_ending(v4, ran, has_error=outputs.has_error)]


def _folded(events: Iterable[OutputEvent]) -> Iterator[OutputEvent]:
    """Yield the events with lines that are written over as they are last."""
    folder = LineFolder()
    for event in events:
        is_text = event.kind in ("stdout", "stderr")
        for kind, text in folder.add(event.kind, event.text) if is_text else folder.settle():
            yield event.model_copy(update={"kind": kind, "text": text, "data": {}})
        if not is_text:
            yield event
    for kind, text in folder.settle():
        yield OutputEvent.model_validate({"sequence": 0, "kind": kind, "text": text})


def _nbformat() -> Any:
    # Imported here, because it takes 80 ms, which a server's start need not pay; and it is untyped.
    return importlib.import_module("nbformat")


def _cell(v4: Any, ran: NotebookCell, outputs: list[Any]) -> Any:
    result = ran.result
    cell = v4.new_code_cell(_source(ran), execution_count=result.execution_count or None if result else None)
    cell.outputs = outputs
    if result is not None:
        # Our own id, so that the same session gives the same file.
        cell.id = result.execution_id
        cell.metadata["belljar"] = {"execution_id": result.execution_id, "status": result.status}
    if ran.is_undone:
        cell.metadata["tags"] = [UNDONE, SKIPPED]
        cell.metadata.setdefault("belljar", {})["undone"] = True
    return cell


def _source(ran: NotebookCell) -> str:
    """Return the code, with a comment for readers where the cell was undone."""
    if not ran.is_undone:
        return ran.code
    first, newline, rest = ran.code.partition("\n")
    # A cell's magic must stay its first line.
    return f"{first}\n{UNDONE_COMMENT}{newline}{rest}" if first.startswith("%%") else f"{UNDONE_COMMENT}\n{ran.code}"


def _ending(v4: Any, ran: NotebookCell, *, has_error: bool) -> list[Any]:
    """Return outputs that say how a cell ended, if it did not end by itself."""
    result = ran.result
    if result is None:
        return [_notice(v4, ran.why_no_result)] if ran.why_no_result else []
    if result.status not in BROKEN_OFF:
        return []
    cause = result.cause or result.error or result.status
    if has_error:  # the interrupt that stopped it, as the cell saw it
        return [_notice(v4, cause)]
    return [v4.new_output("error", ename=result.status, evalue=cause, traceback=[f"{result.status}: {cause}"])]


def _notice(v4: Any, text: str) -> Any:
    return v4.new_output("stream", name="stderr", text=Notice(text).line)


class _Outputs:
    """The outputs of one cell, with a notebook's rules for clearing and updating."""

    def __init__(self, v4: Any, result: ExecutionResult | None, read: ReadDisplay, shown: Shown, limit: int) -> None:
        self._v4 = v4
        self._count = result.execution_count if result else None
        self._read = read
        self._shown = shown
        self._limit = limit
        self._outputs: list[Any] = []
        self._parts: list[tuple[str, bool]] = []
        """Pieces of the last output's text, while that is a stream, and which are notices."""
        self._is_clear_pending = False
        self.has_error = False

    def whole(self) -> list[Any]:
        """Return the outputs so far."""
        self._end_stream()
        return self._outputs

    def add(self, event: OutputEvent) -> None:
        """Add the next event."""
        is_clear = event.kind == "clear"
        if (is_clear and not event.data.get("wait")) or (self._is_clear_pending and not is_clear):
            self._outputs, self._parts = [], []
        self._is_clear_pending = is_clear and bool(event.data.get("wait"))
        match event.kind:
            case "stdout" | "stderr":
                self._stream(event.kind, event.text)
            case "notice":
                self._stream("stderr", event.text, is_notice=True)
            case "input":
                self._stream("stdout", f"{event.text}\n")
            case "display":
                self._display(event)
            case "result":
                bundle = mime_bundle(event, self._read, self._limit)
                output = self._v4.new_output("execute_result", data=bundle, execution_count=self._count)
                if (display_id := display_id_of(event)) is not None:
                    self._shown.setdefault(display_id, []).append(output)
                self._append(output)
            case "error":
                self._error(event)
            case "clear":
                pass

    def _stream(self, name: str, text: str, *, is_notice: bool = False) -> None:
        if not (self._parts and self._outputs[-1].name == name):
            self._append(self._v4.new_output("stream", name=name, text=""))
        self._parts.append((text, is_notice))

    def _end_stream(self) -> None:
        if self._parts:
            self._outputs[-1].text = disarmed_around(self._parts)
            self._parts = []

    def _append(self, output: Any) -> None:
        self._end_stream()
        self._outputs.append(output)

    def _display(self, event: OutputEvent) -> None:
        output = self._v4.new_output("display_data", data=mime_bundle(event, self._read, self._limit))
        if (display_id := display_id_of(event)) is not None:
            if event.data.get("update") and display_id in self._shown:
                _replace(self._shown[display_id], output)
                return
            self._shown.setdefault(display_id, []).append(output)
        self._append(output)

    def _error(self, event: OutputEvent) -> None:
        self.has_error = True
        self._append(self._v4.new_output("error", **error_fields(event)))


def _replace(places: list[Any], output: Any) -> None:
    """Update every display with the same id, in whichever cell it stands."""
    for shown in places:
        shown.data = output.data
