"""Texts of workflows for tests, written as Python: short, and with the keys that matter."""

import json
from typing import Any

Steps = list[dict[str, Any]]


def code(name: str, source: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "code_execution", "config": {"code": source}, **more}


def tool(name: str, tool_name: str, server: str = "ledger", *, options: Any = None, **arguments: Any) -> dict[str, Any]:
    config = {"server": server, "tool": tool_name, "arguments": arguments}
    return {"name": name, "type": "tool_call", "config": config, **(options or {})}


def form(name: str, message: str = "", **config: Any) -> dict[str, Any]:
    options = {key: config.pop(key) for key in ("on_error",) if key in config}
    return {"name": name, "type": "form", "config": {"message": message, **config}, **options}


def condition(name: str, test: str, then: Steps, otherwise: Steps | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "condition", "config": {"if": test, "then": then, "else": otherwise or []}, **more}


def loop(name: str, over: Any, steps: Steps, variable: str = "item", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "loop", "config": {"for": over, "as": variable, "steps": steps}, **more}


def parallel(name: str, *branches: Steps) -> dict[str, Any]:
    return {"name": name, "type": "parallel", "config": {"branches": [*branches]}}


def workflow(*steps: dict[str, Any], name: str = "trial", **more: Any) -> str:
    return json.dumps({"name": name, "steps": [*steps], **more}, indent=1)
