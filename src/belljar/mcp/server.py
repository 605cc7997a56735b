"""MCP servers over one runtime: which surfaces a client sees, and at which HTTP path."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mcp import MCPError
from mcp.server.apps import client_supports_apps
from mcp.server.context import CallNext, HandlerResult, ServerMiddleware, ServerRequestContext
from mcp.server.extension import Extension
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.request_state import AESGCMRequestStateCodec, RequestStateSecurity
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage
from mcp.types import (
    INVALID_PARAMS,
    CallToolResult,
    GetPromptResult,
    InputRequiredResult,
    Prompt,
    ResourceTemplate,
    Tool,
)
from pydantic import AnyUrl, ValidationError

from belljar.distribution import own_version
from belljar.errors import BelljarError, InvalidArgument, SettingsError
from belljar.facts import hookimpl
from belljar.http.auth import current_principal
from belljar.mcp.apps_extension import APP_TOOL, APP_URI, SessionApp
from belljar.mcp.content import Structured, asked_structure, error_blocks
from belljar.mcp.executor import EXECUTOR_INSTRUCTIONS, ExecutorSurface, refusal_as_json
from belljar.mcp.interpreter import InterpreterSurface
from belljar.mcp.resources import OF_ANY_TYPE, resource_mime_type
from belljar.mcp.skill_tools import SkillTools
from belljar.mcp.skills_extension import SkillsExtension
from belljar.mcp.tasks_extension import TasksExtension
from belljar.mcp.toolbox_tools import BESIDE_INSTRUCTIONS, TOOLBOX_INSTRUCTIONS, ToolboxSurface
from belljar.mcp.tools import RequestTracing, in_place_of_sdk_spans, known_arguments, note_refusal, wrong_arguments
from belljar.mcp.tools_list import Surroundings, small_schema, truthful
from belljar.plugins import Plugins
from belljar.products import products
from belljar.runtime import Runtime

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp

    from belljar.http.app import Placement

NAME_LIMIT_CHARS = 200
# The longest path that a file may have, with every byte escaped.
URI_LIMIT_CHARS = 65_536
INSTRUCTIONS = (
    "Runs Python in sealed, stateful sessions. Call execute_code; pass its session_id back to go on with the same "
    "variables and files. Figures come back as images. `import forms` fills in PDF and web forms and asks the person "
    "for what is missing."
)


class BelljarServer(MCPServer[Any]):
    """The SDK's server, with the right media type for each file, and no structured content where none is wanted."""

    structured: Structured = "auto"
    own_refusal: Callable[[BelljarError], CallToolResult] | None = None
    """How a surface reports wrong arguments, if its clients parse every answer; None for our usual form."""
    surroundings: Surroundings | None = None
    """Says what code finds where it runs; None where no tool runs code in sessions of ours."""
    skills: SkillTools | None = None
    """Has a prompt for each skill of the caller; None where there are no skills."""
    correct: Callable[[str], str] | None = None
    """Takes out of a text what is not so on this server; None where all of it is."""

    def add_tool(self, fn: Callable[..., Any], name: str | None = None, *rest: Any, **options: Any) -> None:
        """Add a tool as the SDK does, but refuse a second one of a name, which the SDK would drop with a warning."""
        chosen = name or fn.__name__
        if self._tool_manager.get_tool(chosen) is not None:
            raise ValueError(f"there is a tool {chosen!r} already; choose another name")
        super().add_tool(fn, name, *rest, **options)

    def watch_calls(self) -> None:
        """Trace and count each call. Call it after the last tool is added: only the names of these are recorded."""
        in_place_of_sdk_spans(
            self.middleware, RequestTracing(frozenset(tool.name for tool in self._tool_manager.list_tools()))
        )

    async def run_on(self, read: ReadStream[SessionMessage | Exception], write: WriteStream[SessionMessage]) -> None:
        """Serve one client over the given streams."""
        await self._lowlevel_server.run(read, write, self._lowlevel_server.create_initialization_options())

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool as the SDK does, and answer in the form that the caller or the settings ask for."""
        tool = self._tool_manager.get_tool(name)
        if tool is None:
            name = name[:NAME_LIMIT_CHARS]  # the answer quotes it
        try:
            chosen = known_arguments(name, tool.parameters, arguments) if tool is not None else arguments
            answer = await self._call_validated(name, chosen, context)
        except InvalidArgument as error:
            note_refusal(error)
            return (self.own_refusal or error_blocks)(error)
        is_unwanted = context is not None and asked_structure(context, self.structured) == "never"
        if isinstance(answer, CallToolResult) and is_unwanted:
            answer.structured_content = None
        return answer

    async def _call_validated(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool as the SDK does; raise InvalidArgument, in our words, where it refuses the arguments."""
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            tool = self._tool_manager.get_tool(name)
            # A tool that fails to validate something of its own is a crash, which the SDK reports as unexpected.
            is_crash = isinstance(error, UnexpectedToolError)
            if tool is None or is_crash or not isinstance(error.__cause__, ValidationError):
                raise
            raise wrong_arguments(name, tool.parameters, arguments, error.__cause__) from error

    async def list_tools(self) -> list[Tool]:
        """List the tools as the SDK does, in fewer words, and with the caller's surroundings in `execute_code`'s."""
        useless = await self.surroundings.useless_tools() if self.surroundings is not None else set[str]()
        tools = [tool for tool in await super().list_tools() if tool.name not in useless]
        for tool in tools:
            tool.input_schema = small_schema(tool.input_schema)
            if self.correct is not None:
                tool.description = self.correct(tool.description or "")
                tool.input_schema = json.loads(self.correct(json.dumps(tool.input_schema)))
            if tool.name == "execute_code" and self.surroundings is not None:
                about = await self.surroundings.text(current_principal())
                tool.description = f"{tool.description}\n{about}".rstrip()
        return tools

    async def list_prompts(self) -> list[Prompt]:
        """List the prompts as the SDK does, and one for each skill of the caller."""
        own = await super().list_prompts()
        taken = {prompt.name for prompt in own}
        skills = await self.skills.prompts() if self.skills is not None else []
        return [*own, *(prompt for prompt in skills if prompt.name not in taken)]

    async def get_prompt(
        self, name: str, arguments: dict[str, Any] | None = None, context: Context[Any, Any] | None = None
    ) -> GetPromptResult | InputRequiredResult:
        """Return a prompt as the SDK does, or the instructions of a skill."""
        if self.skills is not None and self._prompt_manager.get_prompt(name) is None:
            return await self.skills.prompt(name)
        return await super().get_prompt(name, arguments, context)

    async def list_resource_templates(self) -> list[ResourceTemplate]:
        """List the templates as the SDK does, without a media type where one template is for files of every type."""
        templates = await super().list_resource_templates()
        for template in templates:
            if template.name in OF_ANY_TYPE:
                template.mime_type = None
        return templates

    async def read_resource(
        self, uri: AnyUrl | str, context: Context[Any, Any] | None = None
    ) -> Iterable[ReadResourceContents] | InputRequiredResult:
        """Read a resource as the SDK does, with the media type of its name instead of the template's."""
        if len(str(uri)) > URI_LIMIT_CHARS:  # the answer would quote it, twice
            raise MCPError(INVALID_PARAMS, f"Unknown resource: its URI has {len(str(uri)):,} characters")
        contents = await super().read_resource(uri, context)
        if isinstance(contents, InputRequiredResult):
            return contents
        return [
            ReadResourceContents(
                content=item.content,
                mime_type=resource_mime_type(str(uri), item.mime_type or "text/plain"),
                meta=item.meta,
            )
            for item in contents
        ]


class AppsOnly(ServerMiddleware[Any]):
    """Middleware that leaves the tool and the page out of lists for clients that cannot draw the page."""

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """Pass the request on, and leave out what is not for this client."""
        answer = await call_next(ctx)
        if isinstance(answer, dict) and ctx.method == "resources/list":
            # Never listed: some clients read every listed resource at every turn, and the tool names the page.
            answer["resources"] = [each for each in answer.get("resources", []) if each["uri"] != APP_URI]
        if isinstance(answer, dict) and ctx.method == "tools/list" and not client_supports_apps(ctx):
            answer["tools"] = [each for each in answer.get("tools", []) if each["name"] != APP_TOOL]
        return answer


def _instructions(surfaces: Sequence[str]) -> str:
    texts = {
        "executor": EXECUTOR_INSTRUCTIONS,
        "interpreter": INSTRUCTIONS,
        "toolbox": BESIDE_INSTRUCTIONS if "interpreter" in surfaces else TOOLBOX_INSTRUCTIONS,
    }
    for product in products():
        texts |= product.instructions
    if missing := [name for name in surfaces if name not in texts]:
        raise SettingsError(
            f"the surface {missing[0]} is not part of this installation of belljar",
            hint=f"There are {', '.join(texts)}",
        )
    return " ".join(text for name, text in texts.items() if name in surfaces)


class _MarkedStates(AESGCMRequestStateCodec):
    """Seals what a client brings back with an answer; before it stands which server waits for it."""

    def __init__(self, mark: str) -> None:
        super().__init__([os.urandom(32)])
        self._mark = f"{mark}."

    def seal(self, payload: bytes) -> str:
        return self._mark + super().seal(payload)

    def unseal(self, token: str) -> bytes:
        return super().unseal(token.removeprefix(self._mark))


def build_server(runtime: Runtime, surfaces: Sequence[str], mark: str = "") -> BelljarServer:
    """Return one MCP server with the given surfaces; the interpreter gets the toolbox too, if there is one.

    `mark` names this server to others that share its work, in what clients bring back to it.
    """
    if runtime.toolbox is not None and "interpreter" in surfaces and "toolbox" not in surfaces:
        surfaces = [*surfaces, "toolbox"]
    server = BelljarServer(
        "belljar",
        title="belljar",
        instructions=truthful(_instructions(surfaces), runtime),
        version=own_version(),
        log_level=runtime.settings.log_level,
        extensions=_extensions(runtime, surfaces),
        request_state_security=RequestStateSecurity(codec=_MarkedStates(mark)) if mark else None,
    )
    server.structured = runtime.settings.structured
    if not (runtime.isolates and runtime.shows_workspace):
        server.correct = partial(truthful, runtime=runtime)
    add_surfaces(runtime.plugins)
    # belljar's own first, so that no plugin can take the name of one of its tools.
    for implementation in reversed(runtime.plugins.implementations("register_surface")):
        runtime.plugins.collect(implementation, server=server, runtime=runtime, surfaces=surfaces)
    server.middleware.append(AppsOnly())
    server.watch_calls()
    return server


def _extensions(runtime: Runtime, surfaces: Sequence[str]) -> list[Extension]:
    """Return the extensions of the protocol that a server with these surfaces offers."""
    found: list[Extension] = []
    if runtime.skills and "executor" not in surfaces:
        found.append(SkillsExtension(runtime.skills))
    if "interpreter" in surfaces:
        found.append(TasksExtension(runtime))
        if runtime.settings.apps == "auto":
            found.append(SessionApp(runtime).extension())
    return found


class BuiltinSurfaces:
    """belljar's own surfaces, as a plugin."""

    @hookimpl
    def register_surface(self, server: BelljarServer, runtime: Runtime, surfaces: Sequence[str]) -> None:
        """Add the tools and resources of each surface."""
        if "interpreter" in surfaces:
            InterpreterSurface(runtime).register(server)
            server.surroundings = Surroundings(runtime)
        if "executor" in surfaces:
            ExecutorSurface(runtime).register(server)
            server.own_refusal = refusal_as_json
        if "toolbox" in surfaces:
            ToolboxSurface(runtime).register(server, has_interpreter="interpreter" in surfaces)
        for product in products():
            product.register(server, runtime, surfaces)
        if runtime.skills is not None and "executor" not in surfaces:
            server.skills = SkillTools(runtime, runtime.skills)
            # The toolbox surface alone stays as small as it is: `toolbox.search` in its cells finds skills too.
            server.skills.register(server, has_tools="interpreter" in surfaces)


def add_surfaces(plugins: Plugins) -> None:
    """Register belljar's own surfaces, once."""
    if all(record.name != "surfaces" or not record.is_core for record in plugins.records):
        plugins.add("surfaces", BuiltinSurfaces())


def build_http_app(
    runtime: Runtime, with_own_auth: "Mapping[str, ASGIApp] | None" = None, placement: "Placement | None" = None
) -> "Starlette":
    """Return an app with the chosen surfaces at /mcp, and each alone at /mcp/NAME; the runtime is open already.

    The apps of `with_own_auth` are served at their paths, and ask for credentials themselves. `placement` finds the
    server that a request is for, where there are several.
    """
    # Imported here, because a server that speaks stdio needs none of it.
    from belljar.http.app import build_app
    from belljar.http.health import Operations

    settings, mark = runtime.settings, placement.mark if placement is not None else ""
    servers = {"/mcp": build_server(runtime, settings.surfaces, mark)}
    servers |= {f"/mcp/{name}": build_server(runtime, [name], mark) for name in settings.surfaces}
    parts = next((parts for product in products() if (parts := product.http(runtime, servers))), None)
    return build_app(
        servers,
        settings,
        operations=Operations(runtime),
        parts=parts,
        with_own_auth=with_own_auth,
        placement=placement,
        endpoints=runtime.plugins.named("http_routes", runtime=runtime),
    )
