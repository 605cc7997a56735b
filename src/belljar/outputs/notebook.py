"""A session's executions as a notebook that Jupyter opens."""

import base64
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from belljar.models import Display, ExecutionResult, OutputEvent

ReadDisplay = Callable[[str], bytes | None]
Shown = dict[str, list[Any]]
Cell = tuple[str, ExecutionResult | None, list[OutputEvent]]


def notebook_json(session_id: str, cells: Iterable[Cell], read_display: ReadDisplay) -> str:
    """The notebook file's text."""
    # Takes 80 ms to import, which a server's start need not pay; and it is untyped.
    nbformat: Any = importlib.import_module("nbformat")
    v4 = nbformat.v4
    notebook = v4.new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
            "belljar": {"session_id": session_id},
        }
    )
    shown: Shown = {}
    for code, result, events in cells:
        cell = v4.new_code_cell(code, execution_count=result.execution_count or None if result else None)
        cell.outputs = _outputs(v4, result, events, read_display, shown)
        if result is not None:
            cell.metadata["belljar"] = {"execution_id": result.execution_id, "status": result.status}
        notebook.cells.append(cell)
    return str(nbformat.writes(notebook))


def _outputs(
    v4: Any, result: ExecutionResult | None, events: list[OutputEvent], read: ReadDisplay, shown: Shown
) -> list[Any]:
    outputs: list[Any] = []
    is_clear_pending = False
    for event in events:
        if event.kind == "clear":
            is_clear_pending = True
            if not event.data.get("wait"):
                outputs.clear()
                is_clear_pending = False
            continue
        if is_clear_pending:
            outputs.clear()
            is_clear_pending = False
        output = _output(v4, result, event, read)
        if output is None:
            continue
        display_id = event.data.get("display_id")
        if event.kind == "display" and isinstance(display_id, str):
            if event.data.get("update") and display_id in shown:
                _replace(shown[display_id], output)
                continue
            shown.setdefault(display_id, []).append(output)
        if outputs and output.output_type == "stream" and outputs[-1].get("name") == output.name:
            outputs[-1].text += output.text
        else:
            outputs.append(output)
    return outputs


def _output(v4: Any, result: ExecutionResult | None, event: OutputEvent, read: ReadDisplay) -> Any:
    match event.kind:
        case "stdout" | "stderr":
            return v4.new_output("stream", name=event.kind, text=event.text)
        case "notice":
            return v4.new_output("stream", name="stderr", text=event.text)
        case "display":
            return v4.new_output("display_data", data=_bundle(event, read))
        case "result":
            count = result.execution_count if result else None
            return v4.new_output("execute_result", data=_bundle(event, read), execution_count=count)
        case "error":
            name, _, message = event.text.partition(": ")
            return v4.new_output("error", ename=name, evalue=message, traceback=event.data.get("traceback") or [])
        case _:
            return None


def _replace(places: list[Any], output: Any) -> None:
    """An update changes every display with its id, in whichever cell it stands."""
    for shown in places:
        shown.data = output.data


def _bundle(event: OutputEvent, read: ReadDisplay) -> dict[str, Any]:
    bundle: dict[str, Any] = {"text/plain": event.text} if event.text else {}
    value = event.data.get("display")
    if not isinstance(value, dict):
        return bundle
    display = Display.model_validate(value)
    if display.plain:
        bundle["text/plain"] = display.plain
    for form in (display, *display.also):
        content = form.text if form.text is not None else _stored(form, read)
        if content is not None:
            bundle[form.mime] = content
    return bundle


def _stored(form: Display, read: ReadDisplay) -> str | None:
    content = read(form.uri or "")
    if content is None:
        return None
    is_binary = form.mime.startswith(("image/", "audio/", "video/", "application/pdf")) and form.mime != "image/svg+xml"
    return base64.b64encode(content).decode() if is_binary else content.decode(errors="replace")
