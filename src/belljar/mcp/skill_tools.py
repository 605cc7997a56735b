"""Tools and prompts for skills: search them by what they do, save them, read their instructions.

No skill costs a client a token before it is searched, listed or read.
"""

import asyncio
from typing import Annotated, Any, Final

from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError
from mcp.types import INVALID_PARAMS, GetPromptResult, Prompt, PromptMessage, TextContent
from pydantic import Field

from belljar.errors import InvalidArgument
from belljar.files.file_types import mime_type_of
from belljar.http.auth import current_principal
from belljar.mcp.content import model_blocks
from belljar.mcp.tools import CHANGES, READS, Answer, add_tools, idempotent, refusals_as_results
from belljar.models import Model
from belljar.runtime import Runtime
from belljar.sessions.skill_saver import SkillSaver, build_content
from belljar.skills.format import MAIN, MAX_BYTES, MAX_FILES
from belljar.skills.library import Skill, SkillLibrary

MAX_PROMPTS: Final = 500
_SHOWN_CHARS: Final = 300


class FoundSkill(Model):
    """One skill of `search_skills`."""

    name: str
    description: str
    instructions: str
    module: str
    state: str = ""


class FoundSkills(Model):
    """Answer of `search_skills`."""

    skills: list[FoundSkill]


class SkillSaved(Model):
    """Answer of `save_skill`."""

    name: str
    version: str
    state: str
    module: str
    servers: list[str]
    files: list[str]


class SkillTools:
    """The tools, the resources and the prompts of skills, over one runtime."""

    def __init__(self, runtime: Runtime, library: SkillLibrary) -> None:
        self._library = library
        self._sessions = runtime.sessions
        self._saver = SkillSaver(runtime.sessions, library)

    def register(self, server: MCPServer[Any], *, has_tools: bool) -> None:
        """Add the resource template to a server, and the tools where they are wanted."""
        if has_tools:
            add_tools(server, (self.search_skills, READS))
        if has_tools and self._library.store is not None:
            add_tools(server, (self.save_skill, idempotent(CHANGES)))
        server.resource("skill://{+path}", name="skill", description="A file of a skill")(self.file)

    @refusals_as_results
    async def search_skills(
        self,
        query: Annotated[str, Field(max_length=1_000)],
        limit: Annotated[int, Field(ge=1, le=50)] = 5,
    ) -> Answer:
        """Find skills: tested code and instructions for recurring tasks, yours from earlier and the operator's.

        Read `skills/NAME/SKILL.md` in execute_code before use.
        """
        owner = current_principal()
        skills = await asyncio.to_thread(self._library.search, owner, query, limit=limit)
        found = [_found(skill) for skill in skills]
        lines = [f"{each.name}: {' '.join(each.description.split())[:_SHOWN_CHARS]}\n  {_use(each)}" for each in found]
        return model_blocks(FoundSkills(skills=found), "\n".join(lines) or "No skill matches.")

    @refusals_as_results
    async def save_skill(
        self,
        name: Annotated[str, Field(description="Lower-case words joined by hyphens, like sales-report")],
        description: Annotated[str, Field(description="What it does and when to use it")],
        code: Annotated[str, Field(description="One Python module; its functions are what is imported")] = "",
        files: Annotated[
            dict[str, str] | None, Field(description="Or files by path, like scripts/a.py, references/b.md, SKILL.md")
        ] = None,
        folder: Annotated[str, Field(description="Or a folder of the session that has them")] = "",
        example: Annotated[str, Field(description="Python that uses it; it must run")] = "",
        session_id: Annotated[str, Field(description="The session it comes from")] = "",
    ) -> Answer:
        """Save code or instructions that worked, for later sessions: `from skills.sales_report import …`.

        It is checked in a fresh session: compiles, imports, the example runs. Saving again makes a new version.
        """
        owner = current_principal()
        given: dict[str, str | bytes] = {**(files or {})}
        if folder:
            given = {**await self._folder(owner, session_id, folder), **given}
        content = build_content(name, description, code=code, files=given)
        saved = await self._saver.save(owner, content, example=example, session_id=session_id)
        report = SkillSaved(
            name=name,
            version=saved.version.short,
            state=saved.version.state,
            module=saved.module,
            servers=[*saved.version.servers],
            files=[each.path for each in saved.version.manifest],
        )
        return model_blocks(report, _saved_text(report))

    async def _folder(self, owner: str, session_id: str, folder: str) -> dict[str, bytes]:
        """Return the files of a folder in a session, within the limits of a skill."""
        if not session_id:
            raise InvalidArgument("folder is one of a session", hint="Pass the session_id too")
        workspace = self._sessions.workspace(session_id, owner)
        parts = workspace.check_name(folder.strip("/"))
        found = (await asyncio.to_thread(workspace.scan, parts, MAX_FILES + 1)).found
        names = [name for name, _ in found if "__pycache__" not in name]
        if len(names) > MAX_FILES or sum(status.st_size for _, status in found) > MAX_BYTES:
            raise InvalidArgument(
                f"{folder[:80]} has over {MAX_FILES} files or {MAX_BYTES:,} bytes", hint="Save a smaller folder"
            )
        prefix = "/".join(parts) + "/"
        return {name.removeprefix(prefix): await asyncio.to_thread(workspace.read, name, MAX_BYTES) for name in names}

    async def file(self, path: str) -> str | bytes:
        """Return a file of one of the caller's skills: text where it is UTF-8, else bytes."""
        found = await asyncio.to_thread(self._library.read, current_principal(), path)
        if found is None:
            raise ResourceNotFoundError(f"No skill file is served at skill://{path[:200]}")
        return as_served(path, found[1])

    # Prompts, for clients that know no skills

    async def prompts(self) -> list[Prompt]:
        """Return a prompt for each of the caller's skills."""
        skills = await asyncio.to_thread(self._library.skills, current_principal())
        served = [skill for skill in skills if not skill.is_plain]
        return [Prompt(name=each.path, description=each.description) for each in served[:MAX_PROMPTS]]

    async def prompt(self, name: str) -> GetPromptResult:
        """Return the instructions of a skill as a message."""
        owner = current_principal()
        found = await asyncio.to_thread(self._library.read, owner, f"{name}/{MAIN}")
        if found is None:
            raise MCPError(INVALID_PARAMS, f"Unknown prompt: {name[:200]}")
        skill, content = found
        others = [file.path for file in skill.files if file.path != MAIN]
        listed = f"\n\nIts files are in `skills/{skill.path}/` of every session: {', '.join(others)}" if others else ""
        text = f"Use the skill {skill.name}.{listed}\n\n{content.decode(errors='replace')}"
        message = PromptMessage(role="user", content=TextContent(type="text", text=text))
        return GetPromptResult(description=skill.description, messages=[message])


def as_served(path: str, content: bytes) -> str | bytes:
    """Return a file as text if that keeps all its bytes, else as bytes."""
    mime = mime_type_of(path)
    if mime.startswith(("image/", "audio/", "video/", "font/")):
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content


def _found(skill: Skill) -> FoundSkill:
    has_python = skill.is_plain or any(file.path.endswith(".py") for file in skill.files)
    return FoundSkill(
        name=skill.path.removesuffix(".py") if skill.is_plain else skill.path,
        description=skill.description,
        instructions=f"skills/{skill.path}" if skill.is_plain else f"skills/{skill.path}/{MAIN}",
        module=skill.module if has_python else "",
        state=skill.version.state if skill.version else "",
    )


def _use(found: FoundSkill) -> str:
    imported = f"; from {found.module} import …" if found.module else ""
    return f"{found.instructions}{imported}"


def _saved_text(report: SkillSaved) -> str:
    lines = [f"Saved skill {report.name}, version {report.version}: {', '.join(report.files)}."]
    if report.module:
        lines.append(f"Import it with `from {report.module} import …`.")
    if report.state == "proposed":
        lines.append("A person has to approve it; until then only the session it was saved from sees it.")
    if report.servers:
        lines.append(f"It uses the servers {', '.join(report.servers)}.")
    return " ".join(lines)
