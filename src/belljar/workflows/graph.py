"""A workflow as a picture: a Mermaid diagram, or an SVG that needs no other program."""

from html import escape

from belljar.toolbox.server_text import shortened
from belljar.workflows.definition import Condition, Definition, Loop, Parallel, Step, SubWorkflow

MAX_LABEL_CHARS = 60
_ROW, _INDENT, _WIDTH, _BOX = 44, 28, 360, 32
_COLOURS = {
    "code_execution": "#e8f0fe",
    "tool_call": "#e6f4ea",
    "form": "#fef7e0",
    "condition": "#fce8e6",
    "loop": "#f3e8fd",
    "parallel": "#e4f7fb",
}


def as_mermaid(definition: Definition) -> str:
    """Return a flowchart in Mermaid's notation."""
    lines = ["flowchart TD", f'  start(["{_label(definition.name)}"])']
    ends = _Mermaid(lines).steps(definition.steps, [("start", "")], "")
    lines.append('  finish(["end"])')
    lines += _edges(ends, "finish")
    return "\n".join(lines)


Ends = list[tuple[str, str]]
"""The nodes that lead to the next one, each with the label of its edge."""


class _Mermaid:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def steps(self, steps: tuple[Step, ...], ends: Ends, prefix: str) -> Ends:
        """Add a list of steps after `ends`; return the nodes that it ends with."""
        for step in steps:
            node = f"{prefix}{step.name}"
            self._lines.append(f"  {node}{_shape(step)}")
            self._lines += _edges(ends, node)
            ends = self._inner(step, node, prefix)
        return ends

    def _inner(self, step: Step, node: str, prefix: str) -> Ends:
        match step.config:
            case Condition():
                then = self.steps(step.blocks[0], [(node, "yes")], prefix)
                return [*then, *self.steps(step.blocks[1], [(node, "no")], prefix)]
            case Loop():
                back = self.steps(step.blocks[0], [(node, "each round")], prefix)
                self._lines += _edges(back, node)
                return [(node, "then")]
            case Parallel():
                return [end for block in step.blocks for end in self.steps(block, [(node, "")], prefix)]
            case _:
                return [(node, "")]


def _edges(ends: Ends, node: str) -> list[str]:
    return [f"  {end} -->|{label}| {node}" if label else f"  {end} --> {node}" for end, label in ends]


def _shape(step: Step) -> str:
    label = f'"{_label(step.name)}<br/><small>{_label(what(step))}</small>"'
    match step.config:
        case Condition():
            return f"{{{label}}}"
        case Loop():
            return f"{{{{{label}}}}}"
        case SubWorkflow():
            return f"[[{label}]]"
        case _:
            return f"[/{label}/]" if step.type == "form" else f"[{label}]"


def what(step: Step) -> str:
    """Return what a step does, in a few words."""
    config = step.config
    match step.type:
        case "tool_call":
            return f"{config.server}.{config.tool}"
        case "condition":
            return f"if {config.if_}"
        case "loop":
            return f"for {config.for_}" if config.for_ is not None else f"while {config.while_}"
        case "parallel":
            return f"{len(step.blocks)} branches"
        case "workflow":
            return str(config.file or config.workflow)
        case "form":
            return str(config.message or "form")
        case "code_execution":
            return str(config.code).strip().split("\n")[0]
        case _:
            return step.type


def _label(text: str) -> str:
    cut = _cut(text)
    # Mermaid reads entities; quotes, brackets and braces would end the label.
    return "".join(f"#{ord(each)};" if each in '"#;<>{}[]()|`&' else each for each in cut)


# SVG: a box for each step, those inside another one indented


def as_svg(definition: Definition) -> str:
    """Return a picture of the steps, each with what it does."""
    rows: list[tuple[int, str, str, str]] = []
    _rows(definition.steps, 0, rows)
    depth = max((row[0] for row in rows), default=0)
    width, height = _WIDTH + depth * _INDENT + 40, (len(rows) + 1) * _ROW + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<text x="20" y="26" font-weight="bold">{escape(definition.name)}</text>',
    ]
    for number, (level, kind, name, text) in enumerate(rows, 1):
        x, y = 20 + level * _INDENT, number * _ROW
        if kind == "label":
            parts.append(f'<text x="{x}" y="{y + 20}" font-style="italic" fill="#5f6368">{escape(name)}</text>')
            continue
        colour = _COLOURS.get(kind, "#f1f3f4")
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_BOX}" rx="6" fill="{colour}" stroke="#5f6368"/>'
            f'<text x="{x + 10}" y="{y + 14}">{escape(name)}</text>'
            f'<text x="{x + 10}" y="{y + 27}" font-size="10" fill="#5f6368">{escape(_cut(text))}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _rows(steps: tuple[Step, ...], level: int, rows: list[tuple[int, str, str, str]]) -> None:
    for step in steps:
        rows.append((level, step.type, step.name, what(step)))
        labels = {"condition": ("then", "else"), "loop": ("each round",)}.get(step.type)
        for index, block in enumerate(step.blocks):
            if block:
                label = labels[index] if labels else f"branch {index + 1}"
                rows.append((level + 1, "label", label, ""))
                _rows(block, level + 1, rows)


def _cut(text: str) -> str:
    return shortened(" ".join(text.split()), MAX_LABEL_CHARS)
