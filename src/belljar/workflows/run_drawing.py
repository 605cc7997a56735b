"""The graph of a run as SVG, made on the server: steps below each other by rank, branches side by side.

Workflows are nested lists of steps, so each list has a width and a height, and no edge crosses another. Colours are
classes of the console's style; states are told by words as well. Knows nothing of requests.
"""

from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Final
from urllib.parse import urlencode

from belljar.engine.runs import GraphNode
from belljar.toolbox.server_text import shortened

_WIDTH: Final = 196
_HEIGHT: Final = 46
_GAP_X: Final = 22
_GAP_Y: Final = 26
_LABEL: Final = 16
_LOOP: Final = 26
_MARGIN: Final = 12
_NAME_CHARS: Final = 24
_TEXT_CHARS: Final = 30
# What is no wider is made to fit a phone; more than that would not be read there.
_NARROW: Final = 2 * _WIDTH + _GAP_X + 2 * _LOOP
# The state that is shown of a step whose rounds are in several.
_FIRST: Final = (
    "failed",
    "waiting",
    "running",
    "interrupted",
    "declined",
    "expired",
    "answered",
    "repeated",
    "skipped",
)


def drawing(name: str, nodes: Sequence[GraphNode], took: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the picture of a list of steps; each box leads to the rounds of its step. All text in it is escaped.

    `took` says how long steps took that are over, by their nodes.
    """
    width, height = _size(nodes)
    parts: list[str] = []
    _draw(parts, nodes, _MARGIN + width / 2, _MARGIN, took)
    kind = "graph narrow-graph" if width <= _NARROW else "graph"
    whole = f"{width + 2 * _MARGIN:.0f}", f"{height + 2 * _MARGIN:.0f}"
    return (
        f'<svg class="{kind}" role="group" aria-label="{escape(f"The steps of {name}")}" width="{whole[0]}" '
        f'height="{whole[1]}" viewBox="0 0 {whole[0]} {whole[1]}">{"".join(parts)}</svg>'
    )


def state_of(states: Mapping[str, int]) -> str:
    """Return the state to show of a step; empty for one that has not begun."""
    return next((state for state in _FIRST if state in states), "done" if states else "")


def states_text(states: Mapping[str, int]) -> str:
    """Return the states of all rounds of a step in words."""
    if sum(states.values()) == 1:
        return next(iter(states))
    ordered = [*(state for state in _FIRST if state in states), *(state for state in states if state not in _FIRST)]
    return ", ".join(f"{states[state]:,} {state}" for state in ordered)


def _size(nodes: Sequence[GraphNode]) -> tuple[float, float]:
    sizes = [_node_size(node) for node in nodes]
    return max((w for w, _ in sizes), default=_WIDTH / 4), sum(h for _, h in sizes) + _GAP_Y * max(0, len(sizes) - 1)


def _node_size(node: GraphNode) -> tuple[float, float]:
    if not node.blocks:
        return _WIDTH, _HEIGHT
    sizes = [_size(block) for block in node.blocks]
    width = sum(w for w, _ in sizes) + _GAP_X * (len(sizes) - 1) + (2 * _LOOP if node.type == "loop" else 0)
    return max(_WIDTH, width), _HEIGHT + 2 * _GAP_Y + _LABEL + max(h for _, h in sizes)


def _draw(
    parts: list[str],
    nodes: Sequence[GraphNode],
    centre: float,
    top: float,
    took: Mapping[str, str],
    *,
    is_skipped: bool = False,
) -> None:
    for place, node in enumerate(nodes):
        _box(parts, node, centre, top, took.get(node.node, ""), is_skipped=is_skipped)
        height = _node_size(node)[1]
        if node.blocks:
            _draw_blocks(parts, node, centre, top, took, is_skipped=is_skipped)
        if place < len(nodes) - 1:
            ends = (centre, top + height), (centre, top + height + _GAP_Y)
            _edge(parts, *ends, is_end=True, is_skipped=is_skipped)
        top += height + _GAP_Y


def _draw_blocks(
    parts: list[str], node: GraphNode, centre: float, top: float, took: Mapping[str, str], *, is_skipped: bool
) -> None:
    """Draw the lists inside a step as columns below it, which come together again below the longest."""
    width, height = _node_size(node)
    sizes = [_size(block) for block in node.blocks]
    fork, end = top + _HEIGHT, top + height
    begin = fork + _GAP_Y + _LABEL
    left = centre - (sum(w for w, _ in sizes) + _GAP_X * (len(sizes) - 1)) / 2
    begun = [any(each.states for each in block) for block in node.blocks]
    # The way that is taken is known once its first step has begun, and is drawn last: it is above the other.
    skipped = [is_skipped or (node.type == "condition" and any(begun) and not one) for one in begun]
    columns: list[tuple[bool, list[str]]] = []
    for (column, block_height), block, label, is_out in zip(sizes, node.blocks, node.labels, skipped, strict=False):
        middle, drawn = left + column / 2, list[str]()
        _edge(drawn, (centre, fork), (middle, begin), is_end=bool(block), is_skipped=is_out)
        if label:
            drawn.append(f'<text class="edge-label" x="{middle + 6:.0f}" y="{begin - 8:.0f}">{escape(label)}</text>')
        _draw(drawn, block, middle, begin, took, is_skipped=is_out)
        _edge(drawn, (middle, begin + block_height), (centre, end), is_end=False, is_skipped=is_out)
        columns.append((is_out, drawn))
        left += column + _GAP_X
    for _, drawn in sorted(columns, key=lambda each: not each[0]):
        parts += drawn
    if node.type == "loop":
        # Back to the head of the loop, beside its steps.
        x, y = centre - width / 2 + _LOOP / 2, top + _HEIGHT / 2
        side = centre - _WIDTH / 2
        below = begin + sizes[0][1]
        # From the side of the last step, apart from the way out; below what comes together again under it.
        is_plain = bool(node.blocks[0]) and not node.blocks[0][-1].blocks
        from_x, from_y = (side, below - _HEIGHT / 2) if is_plain else (centre, below + _GAP_Y / 2)
        kind = "edge back edge-skipped" if is_skipped else "edge back"
        parts.append(f'<path class="{kind}" d="M{from_x:.0f} {from_y:.0f}H{x:.0f}V{y:.0f}H{side - 2:.0f}"/>')
        _arrow(parts, side, y, "right")


def _box(parts: list[str], node: GraphNode, centre: float, top: float, took: str, *, is_skipped: bool) -> None:
    left = centre - _WIDTH / 2
    state = state_of(node.states)
    if node.folded:
        name = f"{node.folded:,} more step{'' if node.folded == 1 else 's'}"
        text, about = states_text(node.states) or "not begun", ""
    else:
        name, text = node.name, states_text(node.states) or ("skipped" if is_skipped else node.what)
        about = f"{node.name}: {node.what}"
    if took:
        text = f"{text}, {took}"
    kind = "folded" if node.folded else state or ("skipped" if is_skipped else "pending")
    inner = (
        f'<rect class="box box-{kind}" x="{left:.1f}" y="{top:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="7"/>'
        f'<text class="box-name" x="{left + 12:.1f}" y="{top + 19:.1f}">{escape(_cut(name, _NAME_CHARS))}</text>'
        f'<text class="box-text" x="{left + 12:.1f}" y="{top + 36:.1f}">{escape(_cut(text, _TEXT_CHARS))}</text>'
    )
    if node.folded:
        parts.append(f"<g>{inner}</g>")
        return
    link = f"?{urlencode({'step': node.node})}#steps"
    parts.append(f'<a href="{escape(link)}"><title>{escape(about)}</title>{inner}</a>')


def _edge(
    parts: list[str],
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    is_end: bool,
    is_skipped: bool = False,
) -> None:
    (x0, y0), (x1, y1) = start, end
    middle = (y0 + y1) / 2 if is_end or abs(x1 - x0) < 1 else y1 - _GAP_Y / 2
    if is_end and abs(x1 - x0) >= 1:
        middle = y0 + _GAP_Y / 2
    line = f"V{y1:.1f}" if abs(x1 - x0) < 1 else f"V{middle:.1f}H{x1:.1f}V{y1:.1f}"
    kind = "edge edge-skipped" if is_skipped else "edge"
    parts.append(f'<path class="{kind}" d="M{x0:.1f} {y0:.1f}{line}"/>')
    if is_end:
        _arrow(parts, x1, y1, "down")


def _arrow(parts: list[str], x: float, y: float, to: str) -> None:
    points = (
        f"{x - 4:.1f},{y - 6:.1f} {x + 4:.1f},{y - 6:.1f} {x:.1f},{y:.1f}"
        if to == "down"
        else f"{x - 6:.1f},{y - 4:.1f} {x - 6:.1f},{y + 4:.1f} {x:.1f},{y:.1f}"
    )
    parts.append(f'<polygon class="edge-end" points="{points}"/>')


def _cut(text: str, most: int) -> str:
    return shortened(" ".join(text.split()), most)
