"""Finds the texts of workflows: a file of the person's, a name in `workflows_directory`, a text that a client sent.

Sub-workflows are read with the workflow that names them, so that a run has all its texts from the start. A text that
a client sent reaches no file of the host but those of `workflows_directory`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from belljar.errors import InvalidArgument, WorkflowInvalid
from belljar.toolbox.server_text import suggestion
from belljar.workflows.definition import Definition, StepKind, SubWorkflow
from belljar.workflows.parser import names_in, parse
from belljar.workflows.source_text import MAX_TEXT_BYTES, LocatedText, TextProblem, invalid, read_text

ENDINGS = (".yaml", ".yml", ".json")
MAX_SUBWORKFLOWS = 100
MAX_SUB_DEPTH = 8


@dataclass(frozen=True, slots=True)
class FoundText:
    """A text, what it is called in errors, and the folder that its own sub-workflows are looked for in."""

    text: str
    file: str
    folder: Path | None = None


Find = Callable[[SubWorkflow, FoundText, str], FoundText]
"""Returns the text of a sub-workflow, given its step, the text around it, and the key it is stored under."""


class Library:
    """The workflows that have names, and the texts of others."""

    def __init__(self, folder: Path | None, types: Mapping[str, StepKind]) -> None:
        self._folder = folder
        self.types = types

    # By name

    def names(self) -> list[str]:
        """Return the names of the workflows in `workflows_directory`."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted({path.stem for path in self._folder.iterdir() if path.suffix in ENDINGS and path.is_file()})

    def by_name(self, name: str) -> Definition:
        """Return a workflow of `workflows_directory`, with its form checked."""
        return self._read(self._text_named(name))

    def _text_named(self, name: str) -> FoundText:
        if self._folder is not None and name in self.names():
            path = next(path for ending in ENDINGS if (path := self._folder / f"{name}{ending}").is_file())
            return FoundText(_read_file(path), path.name, self._folder)
        known = self.names()
        hint = "Set workflows_directory to a folder of workflows" if self._folder is None else ""
        raise InvalidArgument(f"there is no workflow {name[:100]!r}{suggestion(name[:100], known)}", hint=hint)

    # Other texts

    def file(self, path: Path, which: str = "") -> Definition:
        """Return the workflow of a file, with its form checked."""
        return self._read(FoundText(_read_file(path), str(path), path.resolve().parent), which)

    def names_in(self, path: Path) -> list[str]:
        """Return the names of the workflows of a file that has several; empty for a file that is one."""
        return names_in(read_text(_read_file(path), str(path)))

    def from_text(self, text: str) -> Definition:
        """Return the workflow of a text that a client sent, with its form checked."""
        return self._read(FoundText(text, ""))

    def from_record(self, text: str, file: str, texts: Mapping[str, str], which: str = "") -> Definition:
        """Return the workflow of a run from the texts on its record."""

        def find(step: SubWorkflow, _around: FoundText, key: str) -> FoundText:
            return FoundText(texts[key], step.file or step.workflow)

        return self._read(FoundText(text, file), which, find)

    def _read(self, found: FoundText, which: str = "", find: Find | None = None) -> Definition:
        budget = [MAX_SUBWORKFLOWS]
        return self._with_children(found, which, find or self._find, "", (), budget)

    def _with_children(
        self, found: FoundText, which: str, find: Find, key: str, around: tuple[str, ...], budget: list[int]
    ) -> Definition:
        source = read_text(found.text, found.file)
        definition = parse(source, self.types, which)
        digest = hashlib.sha256(found.text.encode(errors="replace")).hexdigest()
        children: dict[str, Definition] = {}
        for step in definition.walk():
            if not isinstance(step.config, SubWorkflow):
                continue
            reference = reference_of(step.config)
            if reference in children:
                continue
            budget[0] -= 1
            if len(around) >= MAX_SUB_DEPTH or budget[0] < 0:
                message = f"sub-workflows are nested more than {MAX_SUB_DEPTH} deep, or there are too many of them"
                raise invalid([source.problem(step.place, message)])
            below = f"{key}>{reference}"
            inner = self._located(find, step.config, found, below, source, step.place)
            inner_digest = hashlib.sha256(inner.text.encode(errors="replace")).hexdigest()
            if inner_digest in (*around, digest):
                message = f"{reference.partition(':')[2]} is a cycle: it is one of the workflows around itself"
                raise invalid([source.problem(step.place, message, "Use a loop instead")])
            children[reference] = self._with_children(inner, "", find, below, (*around, digest), budget)
        return replace(definition, children=children)

    @staticmethod
    def _located(
        find: Find, config: SubWorkflow, around: FoundText, key: str, source: LocatedText, place: Any
    ) -> FoundText:
        try:
            return find(config, around, key)
        except WorkflowInvalid:
            raise
        except InvalidArgument as error:
            raise invalid([source.problem(place, error.message, error.hint)]) from None

    def _find(self, config: SubWorkflow, around: FoundText, _key: str) -> FoundText:
        if config.workflow:
            return self._text_named(config.workflow)
        if around.folder is None:
            raise InvalidArgument(
                f"{config.file!r} cannot be named here, because the workflow is no file",
                hint="Name one of workflows_directory with workflow",
            )
        parts = Path(config.file).parts
        if Path(config.file).is_absolute() or ".." in parts:
            raise InvalidArgument(f"{config.file!r} is not beside its workflow", hint="Move it into the same folder")
        path = around.folder / config.file
        if not path.resolve().is_relative_to(around.folder.resolve()):
            raise InvalidArgument(f"{config.file!r} is not beside its workflow", hint="Move it into the same folder")
        return FoundText(_read_file(path), config.file, path.resolve().parent)


def reference_of(config: SubWorkflow) -> str:
    """Return how a step names its sub-workflow."""
    return f"file:{config.file}" if config.file else f"workflow:{config.workflow}"


def texts_of(definition: Definition, key: str = "") -> dict[str, str]:
    """Return the texts of all sub-workflows, by the keys that `Library.from_record` looks for."""
    found: dict[str, str] = {}
    for reference, child in definition.children.items():
        below = f"{key}>{reference}"
        found[below] = child.source.text
        found |= texts_of(child, below)
    return found


def digest_of(definition: Definition) -> str:
    """Return a digest of all texts of a workflow."""
    whole = json.dumps([definition.source.text, sorted(texts_of(definition).items())])
    return hashlib.sha256(whole.encode(errors="replace")).hexdigest()


def first_difference(before: Definition, after: Definition) -> str:
    """Return which step of a workflow is not as it was; empty if no step differs."""
    if [step.name for step in before.steps] == [step.name for step in after.steps]:
        for old, new in zip(before.steps, after.steps, strict=True):
            if _content(before, old.place) != _content(after, new.place):
                return f"step {new.name} (line {new.line}) differs"
    else:
        for index, new in enumerate(after.steps):
            if index >= len(before.steps) or before.steps[index].name != new.name:
                return f"step {new.name} (line {new.line}) was not there, or at another place"
        return f"step {before.steps[len(after.steps)].name} is gone"
    for reference, child in after.children.items():
        earlier = before.children.get(reference)
        if earlier is not None and (inner := first_difference(earlier, child)):
            return f"in {reference.partition(':')[2]}, {inner}"
    if before.variables != after.variables:
        return "the variables differ"
    return ""


def _content(definition: Definition, place: tuple[str | int, ...]) -> Any:
    found: Any = definition.source.data
    for key in place:
        found = found[key]
    return found


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            hint = "Put data into files and repeat steps in a loop"
            raise invalid([TextProblem(f"the text has more than {MAX_TEXT_BYTES:,} bytes", str(path), 0, hint)])
        return content.decode("utf-8-sig")
    except OSError as error:
        raise InvalidArgument(
            f"workflow {path} cannot be read: {error.strerror}", hint="Name a YAML or JSON file"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"workflow {path} is not UTF-8 at byte {error.start:,}") from error
