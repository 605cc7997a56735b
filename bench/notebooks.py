"""One notebook in two places: as a session in the journal, and as a file for JupyterLab.

Ten cells of an analysis are run once, by an agent in a session; what the journal then has of them is written again
under other ids until there are as many as are wanted. Pages of the console read these rows as they read any others.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
from mcp import Client

from belljar.journal.journal import ExecutionRecord, Journal, open_journal
from belljar.journal.session_records import SessionRecords
from belljar.models import ExecutionResult, OutputEvent

CELLS = (
    "import numpy as np, pandas as pd\nimport matplotlib.pyplot as plt\n"
    "rng = np.random.default_rng(7)\n"
    "sales = pd.DataFrame({'region': rng.choice(['North', 'South', 'East', 'West'], 600),\n"
    "                      'month': rng.integers(1, 13, 600), 'revenue': rng.gamma(3, 900, 600).round(2)})",
    "sales.describe()",
    "for month, group in sales.groupby('month'):\n    print(f'month {month:2}: {group.revenue.sum():12,.2f}')",
    "sales.groupby('region').revenue.sum().plot.bar(figsize=(5, 2.5)); plt.show()",
    "[round(n) for n in sales.revenue.head(20)]",
    "sales.pivot_table(index='month', columns='region', values='revenue', aggfunc='sum').round(1)",
    "sales['town']",
    "import warnings\nwarnings.warn('3 rows have no region')\nprint('checked')",
    "def outliers(frame, column, times=3.0):\n"
    "    '''The rows whose value is far from the others.'''\n"
    "    low, high = frame[column].quantile([0.25, 0.75])\n"
    "    width = (high - low) * times\n"
    "    return frame[(frame[column] < low - width) | (frame[column] > high + width)]\n\n"
    "len(outliers(sales, 'revenue', 1.5))",
    "sales.nlargest(5, 'revenue')",
)
LINE = "step {number}\n"
PART_CHARS = 8_000
"""About how much text an event of a cell that prints a lot holds."""


@dataclass(frozen=True, slots=True)
class ModelCell:
    """A cell as the journal has it after it was run."""

    code: str
    events: list[OutputEvent]
    result: ExecutionResult


@dataclass(frozen=True, slots=True)
class ModelNotebook:
    """The cells that were run, the folder with what they displayed, and the same as a notebook."""

    cells: list[ModelCell]
    displays: Path
    notebook: dict[str, Any]


async def run_model(client: Client, data_directory: Path) -> ModelNotebook:
    """Run the cells, and read what the journal has of them."""
    session_id, results = "", list[ExecutionResult]()
    for code in CELLS:
        arguments = {"code": code, "session_id": session_id, "wait_s": 60}
        answer = await client.call_tool("execute_code", arguments, meta={"belljar/structured": "always"})
        results.append(ExecutionResult.model_validate(answer.structured_content))
        session_id = results[-1].session_id
    text = (await client.read_resource(f"session://{session_id}/notebook")).contents[0]
    with open_journal(data_directory / "journal.sqlite") as journal:
        cells = [
            ModelCell(code, [*journal.events(result.execution_id)], result)
            for code, result in zip(CELLS, results, strict=True)
        ]
    displays = data_directory / "sessions" / session_id / "displays"
    return ModelNotebook(cells, displays, json.loads(getattr(text, "text", "")))


def write_session(data_directory: Path, model: ModelNotebook, count: int) -> str:
    """Write a sleeping session of `count` cells; its id."""
    with open_journal(data_directory / "journal.sqlite") as journal:
        session_id = _enter(journal, f"{count:,} cells")
        displays = data_directory / "sessions" / session_id / "displays"
        displays.mkdir(parents=True)
        for number in range(count):
            cell = model.cells[number % len(model.cells)]
            execution_id = secrets.token_hex(16)
            known = cell.result.execution_id
            events = [
                event.model_copy(update={"data": json.loads(json.dumps(event.data).replace(known, execution_id))})
                for event in cell.events
            ]
            changes = {"execution_id": execution_id, "session_id": session_id, "execution_count": number + 1}
            _write(journal, replace(cell, events=events, result=cell.result.model_copy(update=changes)))
            if (model.displays / known).is_dir():
                shutil.copytree(model.displays / known, displays / execution_id, copy_function=os.link)
    return session_id


def write_long_cell(data_directory: Path, model: ModelNotebook, lines: int) -> str:
    """Write a sleeping session whose one cell printed `lines` lines; its id."""
    with open_journal(data_directory / "journal.sqlite") as journal:
        session_id = _enter(journal, f"{lines:,} lines")
        changes: dict[str, Any] = {
            "execution_id": secrets.token_hex(16), "session_id": session_id, "execution_count": 1,
            "success": True, "status": "ok", "result": None, "displays": [], "output": [], "stdout": "", "stderr": "",
        }  # fmt: skip
        text = printed(lines)
        events = [
            OutputEvent(sequence=place + 1, kind="stdout", text=text[start : start + PART_CHARS])
            for place, start in enumerate(range(0, len(text), PART_CHARS))
        ]
        result = model.cells[0].result.model_copy(update={**changes, "sequence": len(events)})
        _write(journal, ModelCell(f"for n in range({lines}): print('step', n)", events, result))
    return session_id


def printed(lines: int) -> str:
    """The text of that many lines."""
    return "".join(LINE.format(number=number) for number in range(lines))


def write_notebook(path: Path, model: ModelNotebook, count: int) -> None:
    """Write the same cells as `write_session` does, as a notebook."""
    cells = model.notebook["cells"]
    chosen = [cell for cell in cells if cell["cell_type"] == "code"]
    _write_cells(path, model, [dict(chosen[number % len(chosen)]) for number in range(count)])


def write_long_notebook(path: Path, model: ModelNotebook, lines: int) -> None:
    """Write the same cell as `write_long_cell` does, as a notebook."""
    outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed(lines))]
    source = f"for n in range({lines}): print('step', n)"
    _write_cells(path, model, [nbformat.v4.new_code_cell(source, outputs=outputs, execution_count=1)])


def _write_cells(path: Path, model: ModelNotebook, cells: Sequence[dict[str, Any]]) -> None:
    numbered = [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({**model.notebook, "metadata": kernel, "cells": numbered}))


def _enter(journal: Journal, reason: str) -> str:
    session_id = secrets.token_hex(16)
    records = SessionRecords(journal, "0-bench")
    records.enter(session_id, "local", "default", reason)
    records.put_to_sleep(session_id, "written by the benchmark")
    return session_id


def _write(journal: Journal, cell: ModelCell) -> None:
    result = cell.result
    journal.submit(ExecutionRecord(result.execution_id, result.session_id, "local", cell.code, None), time.time())
    journal.start(result.execution_id)
    for event in cell.events:
        journal.append(result.execution_id, event)
    journal.finish(result, output_bytes=sum(len(event.text) for event in cell.events))
