"""Workflows: lists of steps that a person can read, run in a session, outlive their server, and are run once.

`PRODUCT` is all that belljar's core sees of them, and imports the rest when it is asked for.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from belljar.products import Page, Product, ProductPages

if TYPE_CHECKING:
    import asyncio

    from belljar.engine.contract import Engine
    from belljar.runtime import Runtime


class WorkflowsProduct(Product):
    """The tools, commands, step types and runs of workflows."""

    name = "workflows"
    navigation = MappingProxyType({"/console/workflows": "Workflows"})
    templates = Path(__file__).parent / "pages"

    def plugin(self) -> object:
        """See `Product`."""
        from belljar.workflows.definition import BuiltinStepTypes

        return BuiltinStepTypes()

    @asynccontextmanager
    async def open(self, runtime: "Runtime", ready: "asyncio.Task[None] | None") -> AsyncGenerator[object]:
        """Drive runs, and go on with those that nobody drives when the runtime is ready, or never."""
        import asyncio

        from belljar.journal.run_records import RunRecords
        from belljar.workflows.run_history import RunHistory
        from belljar.workflows.workflows import RunInbox, Workflows

        workflows = Workflows.over(runtime)
        journal = runtime.sessions.journal
        runtime.sessions.inbox.sources.append(RunInbox(workflows, RunRecords(journal, runtime.name)))
        runtime.late_engine.show_runs(RunHistory(workflows, journal.path, journal.commit))
        looking = asyncio.create_task(workflows.go_on_with_others(ready)) if ready is not None else None
        try:
            yield workflows
        finally:
            if looking is not None:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
            await workflows.aclose()

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
        from belljar.workflows.run_tasks import RunTasks

        return [RunTasks(runtime)]


PRODUCT = WorkflowsProduct()
