"""The pages of workflows in the console: runs, and one run with its graph and its steps on a time axis.

What is shown comes from the engine, so that a console of several servers shows all of them. Templates are in `pages/`.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlencode

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from belljar.console.forms import check_length
from belljar.console.templating import duration_text, markup, render
from belljar.engine.contract import Access, Engine
from belljar.engine.runs import RunActs, RunDetail
from belljar.errors import InvalidArgument
from belljar.journal.run_records import RUN_STATES
from belljar.products import Page, ProductPages
from belljar.workflows.run_drawing import drawing

RUNS: Final = "/console/workflows"
_RUNS_AT_ONCE: Final = 50
_STEPS_AT_ONCE: Final = 100
_AXIS_PIXELS: Final = 240
_LEAST_PIXELS: Final = 2.0
_ACTS: Final[dict[str, RunActs]] = {"resume": "resume", "stop": "stop"}
_MAX_VALUE_CHARS: Final = 500


class RunPages:
    """Makes these pages; `page` puts them into their frame."""

    def __init__(self, engine: Engine, page: Page) -> None:
        self._engine = engine
        self._page = page

    def all(self) -> ProductPages:
        """Return the routes, and the parts of pages that change while they are open."""
        routes = [
            Route(RUNS, self.runs, methods=["GET"]),
            Route(f"{RUNS}/{{run_id}}", self.run, methods=["GET"]),
            Route(f"{RUNS}/{{run_id}}", self.act, methods=["POST"]),
        ]
        return ProductPages(routes, {"runs": self.runs_part, "run": self.run_part})

    async def runs(self, request: Request) -> Response:
        """Answer `/console/workflows`."""
        wanted = {name: request.query_params.get(name, "")[:200] for name in ("state", "q", "cursor")}
        values = await self._runs(request.state.access, wanted)
        # A later page, of runs that are over, stays as it is.
        stream = "" if wanted["cursor"] else f"runs:{urlencode(wanted)}"
        return await self._page("runs.html", request, **values, states=RUN_STATES, stream=stream)

    async def runs_part(self, access: Access, query: str) -> str:
        """Return the part of the list that changes, for what it was asked for."""
        wanted = {name: values[0] for name, values in parse_qs(query).items()}
        return render("_runs.html", access=access, **await self._runs(access, wanted))

    async def _runs(self, access: Access, wanted: Mapping[str, str]) -> dict[str, Any]:
        state, text = wanted.get("state", ""), wanted.get("q", "")
        found = await self._engine.runs(access, state, text, wanted.get("cursor", ""), _RUNS_AT_ONCE)
        return {"runs": found.items, "next": found.next, "state": state, "q": text}

    async def run(self, request: Request) -> Response:
        """Answer `/console/workflows/ID?step=…&offset=…`."""
        run_id, query = str(request.path_params["run_id"]), request.query_params
        wanted = {"step": query.get("step", "")[:1_000], "offset": query.get("offset", "")}
        values = await self._run(request.state.access, run_id, wanted)
        return await self._page("run.html", request, **values, stream=f"run:{quote(run_id)}?{urlencode(wanted)}")

    async def run_part(self, access: Access, name: str) -> str:
        """Return the part of a run's page that changes."""
        run_id, _, query = name.partition("?")
        wanted = {key: values[0] for key, values in parse_qs(query).items()}
        return render("_run.html", access=access, **await self._run(access, run_id, wanted))

    async def _run(self, access: Access, run_id: str, wanted: Mapping[str, str]) -> dict[str, Any]:
        step, offset = wanted.get("step", ""), wanted.get("offset", "")
        first = int(offset) if offset.isascii() and offset.isdecimal() and len(offset) < 10 else 0
        run = await self._engine.run(access, run_id, step, first, _STEPS_AT_ONCE)
        begin, end = _span(run)
        return {
            "run": run,
            "step": step,
            "variables": {name: _shown(value) for name, value in run.variables.items()},
            "graph": markup(drawing(run.name, run.graph, _took(run))) if run.graph else "",
            "bars": [_bar(each.began_at, each.duration_s, begin, end) for each in run.steps],
            "axis_begin": duration_text(begin - _at(run.started_at)) if run.steps else "",
            "axis_end": duration_text(end - _at(run.started_at)) if run.steps else "",
            "earlier": max(0, first - _STEPS_AT_ONCE) if first else None,
            "later": first + len(run.steps) if first + len(run.steps) < run.total_steps else None,
        }

    async def act(self, request: Request) -> Response:
        """Answer `POST /console/workflows/ID`: go on with a run, or stop it."""
        access: Access = request.state.access
        run_id = str(request.path_params["run_id"])
        check_length(request)
        async with request.form(max_files=0, max_fields=2) as form:
            act = str(form.get("act", ""))
        if act not in _ACTS:
            raise InvalidArgument(f"there is no act {act[:64]!r}", hint=f"It is {' or '.join(_ACTS)}")
        await self._engine.steer_run(access, run_id, _ACTS[act])
        return RedirectResponse(f"{RUNS}/{quote(run_id, safe='')}", status_code=303)


def _shown(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)[:_MAX_VALUE_CHARS]


def _took(run: RunDetail) -> dict[str, str]:
    """Return how long steps took that are over, with all of their rounds; nothing where not all rounds are here."""
    if len(run.steps) < run.total_steps:
        return {}
    found: dict[str, float] = {}
    for step in run.steps:
        found[step.node] = found.get(step.node, 0.0) + step.duration_s
    going = {step.node for step in run.steps if step.state in ("running", "waiting")}
    return {node: duration_text(seconds) for node, seconds in found.items() if node not in going}


def _at(time_iso: str) -> float:
    return datetime.fromisoformat(time_iso).timestamp()


def _span(run: RunDetail) -> tuple[float, float]:
    """Return when the first of the shown steps began and the last ended."""
    begins = [_at(step.began_at) for step in run.steps]
    ends = [begin + step.duration_s for begin, step in zip(begins, run.steps, strict=True)]
    return min(begins, default=0.0), max(ends, default=0.0)


def _bar(began_at: str, duration_s: float, begin: float, end: float) -> dict[str, str]:
    """Return where a step is on the axis, and how long."""
    scale = _AXIS_PIXELS / ((end - begin) or 1.0)
    width = max(_LEAST_PIXELS, duration_s * scale)
    left = min((_at(began_at) - begin) * scale, _AXIS_PIXELS - width)
    return {"x": f"{left:.1f}", "width": f"{width:.1f}"}
