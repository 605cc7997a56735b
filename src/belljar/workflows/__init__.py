"""Workflows: lists of steps that a person can read, run in a session, outlive their server, and are run once.

`PRODUCT` is all that belljar's core sees of them, and imports the rest when it is asked for.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from belljar.products import Page, Product, ProductPages

if TYPE_CHECKING:
    import asyncio

    from belljar.engine.contract import Engine
    from belljar.engine.runs import RunSource
    from belljar.journal.run_records import RunRecords
    from belljar.runtime import Runtime
    from belljar.workflows.definition import StepKind
    from belljar.workflows.workflows import Workflows

LOOK_S = 5.0
"""How often a server looks for runs that nobody drives and that can go on."""

log = logging.getLogger(__name__)


class WorkflowsProduct(Product):
    """The tools, commands, step types and runs of workflows."""

    name = "workflows"
    navigation = MappingProxyType({"/console/workflows": "Workflows"})
    templates = Path(__file__).parent / "pages"

    def plugin(self) -> object:
        """See `Product`."""
        from belljar.facts import hookimpl

        class BuiltinStepTypes:
            """belljar's own step types, registered through the hook that plugins use."""

            @hookimpl
            def workflow_step_types(self) -> "tuple[StepKind, ...]":
                from belljar.workflows.definition import OWN_TYPES

                return OWN_TYPES

        return BuiltinStepTypes()

    @asynccontextmanager
    async def open(self, runtime: "Runtime", ready: "asyncio.Task[None] | None") -> AsyncGenerator[object]:
        """Drive runs, and go on with those that nobody drives when the runtime is ready, or never."""
        import asyncio

        from belljar.journal.run_records import RunRecords
        from belljar.workflows.questions import RunInbox

        records = RunRecords(runtime.sessions.journal, runtime.name)
        late = LateWorkflows(runtime, records)
        runtime.sessions.inbox.sources.append(RunInbox(records, late.get))
        runtime.late_engine.show_runs(late.history)
        looking = asyncio.create_task(late.go_on_with_others(ready)) if ready is not None else None
        try:
            yield late
        finally:
            if looking is not None:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
            await late.aclose()

    def add_tools(self, server: Any, runtime: "Runtime") -> None:
        """See `Product`."""
        if runtime.settings.has_workflows:
            from belljar.workflows.tools import WorkflowTools

            WorkflowTools(runtime).register(server)

    def pages(self, engine: "Engine", page: Page) -> ProductPages:
        """See `Product`."""
        from belljar.workflows.run_pages import RunPages

        return RunPages(engine, page).all()

    def task_sources(self, runtime: "Runtime") -> Sequence[Any]:
        """See `Product`."""
        if not runtime.settings.has_workflows:
            return ()
        from belljar.workflows.run_tasks import RunTasks

        return [RunTasks(runtime)]


class LateWorkflows:
    """The workflows of a runtime, made when they are first asked for: most servers never run one."""

    def __init__(self, runtime: "Runtime", records: "RunRecords") -> None:
        self._runtime = runtime
        self._records = records
        self._made: Workflows | None = None
        self._history: RunSource | None = None

    def get(self) -> "Workflows":
        """Return them."""
        from belljar.workflows.workflows import Workflows

        if self._made is None:
            self._made = Workflows.over(self._runtime)
        return self._made

    def history(self) -> "RunSource":
        """Return their runs as people look at them."""
        from belljar.workflows.run_history import RunHistory

        if self._history is None:
            journal = self._runtime.sessions.journal
            self._history = RunHistory(self.get(), journal.path, journal.commit)
        return self._history

    async def go_on_with_others(self, ready: "asyncio.Task[None]") -> None:
        """Look for runs that nobody drives, once the server is ready, and go on with them, until it is cancelled."""
        import asyncio

        await asyncio.wait([ready])
        while True:
            try:
                if self._records.has_any():
                    await self.get().go_on_with_others()
            except Exception:
                # What is wrong with one look must not end all later ones.
                log.exception("runs of others could not be looked at")
            await asyncio.sleep(LOOK_S)

    async def aclose(self) -> None:
        """Stop driving."""
        if self._made is not None:
            await self._made.aclose()


PRODUCT = WorkflowsProduct()
