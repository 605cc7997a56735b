"""A type of workflow steps: profiles a CSV file of the session and hands back its columns and row count.

    - name: look
      type: csv_profile
      config: {path: sales.csv}

Its Python runs in the session of the workflow's run, so that policy, limits and the journal hold for it.
"""

from collections.abc import Iterable

from belljar.hooks import CodeStep, StepType, hookimpl

CODE = """
import csv
with open(config["path"], newline="") as _file:
    _rows = list(csv.DictReader(_file))
{"columns": list(_rows[0]) if _rows else [], "rows": len(_rows)}
"""
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "minLength": 1}},
    "required": ["path"],
    "additionalProperties": False,
}


@hookimpl
def workflow_step_types() -> Iterable[StepType]:
    """Return the step `csv_profile`; it only reads, so it may run again after a crash."""
    return [CodeStep("csv_profile", CODE, SCHEMA, repeat=True)]
