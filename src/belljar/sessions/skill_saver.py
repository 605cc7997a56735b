"""Saves skills: builds the folder, checks it in a sandboxed session of its own, and stores it.

What fails any check is refused with the file, the line and the reason, and nothing is stored. Nothing of a skill runs
on the host.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from belljar.errors import BelljarError, CodeRejected, InvalidArgument
from belljar.executions.cell import make_cell
from belljar.executions.policy_check import ask_nobody, check_policy
from belljar.facts import CellFacts
from belljar.models import ExecutionResult
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session
from belljar.skills.format import (
    MAIN,
    SCRIPTS,
    BadSkill,
    SkillContent,
    check_content,
    check_name,
    module_name,
    servers_of,
    write_main,
)
from belljar.skills.library import SkillLibrary
from belljar.skills.store import Version

CHECK_S: Final = 60.0
NOTHING_STORED: Final = "Mend it and save it again; nothing was stored"
_REASON_CHARS: Final = 600
# Where IPython's and Python's tracebacks name a place in a file of the skill {name}.
_PLACE: Final = r"/skills/(?:\.copies/\w+|{name})/([^\s:\"']+\.py)(?::|\", line )(\d+)"
_EXAMPLE_FAILS: Final = "its example fails"
_CELL_PLACE: Final = re.compile(r"^Cell In\[\d+\], line (\d+)", re.MULTILINE)
_SYNTAX_PLACE: Final = re.compile(r"\(([^()/]+\.py), line (\d+)\)\Z")
_COMPILE: Final = """\
def _belljar_check():
    import os, pathlib
    folder = pathlib.Path(os.environ["BELLJAR_SKILLS"]) / {name!r}
    for path in sorted(folder.rglob("*.py")):
        compile(path.read_bytes(), path.relative_to(folder).as_posix(), "exec")
_belljar_check()
"""
_IMPORT: Final = """\
import importlib as _belljar_importlib
for _belljar_name in {modules!r}:
    _belljar_importlib.import_module(_belljar_name)
"""


@dataclass(frozen=True, slots=True)
class SavedVersion:
    """What became of a skill that was saved."""

    name: str
    version: Version
    module: str
    """What sessions import it as; empty where it has no Python."""


class SkillSaver:
    """Saves the skills of all owners of a runtime."""

    def __init__(self, sessions: Registry, library: SkillLibrary) -> None:
        self._sessions = sessions
        self._library = library
        self._settings = sessions.settings

    async def save(self, owner: str, content: SkillContent, *, example: str = "", session_id: str = "") -> SavedVersion:
        """Check a skill and store it; `session_id` sees it at once even where a person has to approve it."""
        store = self._library.store
        if store is None:
            raise InvalidArgument("skills cannot be saved here", hint="The operator can set skills to on")
        check_content(content)
        scan = await asyncio.to_thread(self._library.scan)
        if content.name in {*scan.skills, *scan.problems}:
            raise BadSkill(f"the operator has a skill {content.name!r} already", hint="Choose another name")
        if session_id:
            self._sessions.workspace(session_id, owner)  # another owner's session is refused as an unknown one
        await self._check(owner, content, example)
        state = "proposed" if self._settings.skills_review else "approved"
        servers = servers_of(content.files)
        version = await asyncio.to_thread(
            store.of(owner).add, content, state=state, session_id=session_id, servers=servers
        )
        module = f"skills.{module_name(content.name)}" if _has_python(content) else ""
        return SavedVersion(content.name, version, module)

    async def _check(self, owner: str, content: SkillContent, example: str) -> None:
        """Compile and import its Python and run its example, in a session that is then cleared."""
        if not _has_python(content) and not example:
            return
        await self._sessions.make_room(owner)
        session = self._sessions.create(owner, reason=f"check of skill {content.name}")
        try:
            if session.skills is None:
                raise InvalidArgument("skills cannot be saved here", hint="The operator can set skills to on")
            session.skills.candidate = content
            with session.in_use():
                await self._check_policy(session, content)
            await self._run(session, content, _COMPILE.format(name=content.name), "it does not compile")
            modules = _modules(content)
            await self._run(session, content, _IMPORT.format(modules=modules), "it does not import")
            if example:
                await self._run(session, content, example, _EXAMPLE_FAILS)
        finally:
            await self._sessions.clear(session.id, owner)

    async def _check_policy(self, session: Session, content: SkillContent) -> None:
        """Refuse Python that the policy would not let a cell run, because an import of it would not be looked at."""
        if not session.guard.inspects_code and "judge_code" not in session.plugins.used_hooks:
            return
        for path, data in content.files.items():
            if not path.endswith(".py"):
                continue
            code = data.decode(errors="replace")
            facts = CellFacts(session.id, session.principal, f"skill {content.name}", code, session.environment)
            try:
                await check_policy(session.plugins, session.guard, facts, ask_nobody)
            except CodeRejected as error:
                reason = error.message.removeprefix("the code did not run").lstrip(":, ")
                raise BadSkill(
                    f"skill {content.name} was not saved: the policy does not allow {path}: {reason}",
                    hint=NOTHING_STORED,
                ) from error

    async def _run(self, session: Session, content: SkillContent, code: str, failure: str) -> None:
        try:
            execution = session.submit(make_cell(self._settings, code, timeout_s=CHECK_S))
            await execution.wait(CHECK_S + self._settings.start_timeout_s + execution.stop_s)
        except BelljarError as error:
            raise BadSkill(f"skill {content.name} was not saved: {failure}: {error}", hint=NOTHING_STORED) from error
        result = execution.result()
        if result.status != "ok":
            reason = _reason(result, content, is_example=failure == _EXAMPLE_FAILS)
            raise BadSkill(f"skill {content.name} was not saved: {failure}: {reason}", hint=NOTHING_STORED)


def build_content(
    name: str, description: str, *, code: str = "", files: Mapping[str, str | bytes] | None = None
) -> SkillContent:
    """Return the folder of a skill from what a caller gives: one module's code, or files by path."""
    check_name(name)
    given = {path: data if isinstance(data, bytes) else _encoded(path, data) for path, data in (files or {}).items()}
    if code:
        path = f"{SCRIPTS}/{module_name(name)}.py"
        if path in given:
            raise BadSkill(f"{path} comes both as code and as a file", hint="Pass one of them")
        given[path] = _encoded(path, code if code.endswith("\n") else f"{code}\n")
    if MAIN not in given:
        if not given:
            raise BadSkill(f"skill {name} has neither code nor files", hint="Pass one of them")
        given[MAIN] = write_main(name, description, _usage(name, description, given), servers_of(given))
    return SkillContent(name, given)


def _encoded(path: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadSkill(f"{path[:80]} has a lone surrogate at character {error.start}") from None


def _usage(name: str, description: str, files: Mapping[str, bytes]) -> str:
    """Return the instructions of a skill that came without any: what there is and how it is imported or run."""
    lines = [f"# {name}", "", description, ""]
    prefix = f"{SCRIPTS}/"
    scripts = sorted(path for path in files if path.startswith(prefix) and path.endswith(".py"))
    for path in scripts:
        functions = re.findall(r"^(?:async )?def ([a-zA-Z]\w*)\(", files[path].decode(errors="replace"), re.MULTILINE)
        listed = f": {', '.join(functions[:20])}" if functions else ""
        lines.append(f"- `{path}`{listed}")
    others = sorted(path for path in files if path not in scripts)
    lines += [f"- `{path}`" for path in others]
    if scripts:
        lines += ["", f"In a belljar session: `from skills.{module_name(name)} import …`; elsewhere run the script."]
    return "\n".join(lines)


def _has_python(content: SkillContent) -> bool:
    return any(path.endswith(".py") for path in content.files)


def _modules(content: SkillContent) -> list[str]:
    """Return the modules of a skill that sessions can import, the skill itself first."""
    package = f"skills.{module_name(content.name)}"
    folder = f"{SCRIPTS}/" if any(path.startswith(f"{SCRIPTS}/") for path in content.files) else ""
    names = [path.removeprefix(folder).removesuffix(".py") for path in content.files if path.endswith(".py")]
    return [package, *sorted(f"{package}.{name}" for name in names if name.isidentifier() and name != "__init__")]


def _reason(result: ExecutionResult, content: SkillContent, *, is_example: bool) -> str:
    """Return the error, and where in the skill's own files it arose, as far as that can be told."""
    error = str(result.error or result.cause or result.status)[:_REASON_CHARS]
    if (syntax := _SYNTAX_PLACE.search(error)) is not None:
        # Python names the file of a syntax error without its folder.
        paths = [path for path in content.files if path.rpartition("/")[2] == syntax[1]]
        return f"{error[: syntax.start()]}({paths[0]}, line {syntax[2]})" if len(paths) == 1 else error
    places: list[tuple[str, str]] = re.findall(_PLACE.format(name=content.name), "\n".join(result.traceback))
    own = [f" ({path}, line {line})" for path, line in places if path in content.files]
    if not own and is_example:
        own = [f" (line {line} of the example)" for line in _CELL_PLACE.findall("\n".join(result.traceback))]
    return f"{error}{own[-1] if own else ''}"
