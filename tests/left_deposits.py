"""What each version of belljar has left for the next: files in `tests/left`, with a deposit's fields of each kind."""

import json
from pathlib import Path
from typing import Any

from belljar.supervisor.deposit_format import FORM

_FOLDER = Path(__file__).parent / "left"
NAMES = sorted(path.stem for path in _FOLDER.glob("deposits-*.json"))
PRESENT = f"deposits-{FORM}"
_EARLIER_NAMES = {"is_left_alone": "is_alone", "kills_maker": "is_alone", "has_stage": "has_root_view"}
_OF_A_HOST = {"places", "folders", "devices"}
"""Objects whose names are not the format's."""


def left_by(name: str) -> dict[str, dict[str, Any]]:
    """What one version left."""
    return json.loads((_FOLDER / f"{name}.json").read_text())


def kind_of(fields: dict[str, Any]) -> str:
    """The kind of a deposit, as the files name it."""
    if "spec" in fields:
        return "nested sandbox" if fields["origin"] else "sandbox"
    if "place" in fields:
        return "checkpoint" if fields["place"] else "fresh checkpoint"
    return "groups" if "run" in fields else "session"


def shape(value: Any) -> Any:
    """The names in a deposit and the types of its values, without what is one host's."""
    match value:
        case {**fields}:
            return {name: "" if name in _OF_A_HOST else shape(one) for name, one in fields.items()}
        case [{**fields}, *_]:
            return [shape(fields)]
        case [*_]:
            return []
        case _:
            return type(value).__name__


def as_left(model: Any, value: Any) -> Any:
    """What this version deposits, with the names of another version and without what that one did not have."""
    match model, value:
        case {**former}, {**present}:
            own = {name: _EARLIER_NAMES.get(name, name) for name in former}
            return {
                name: present[own[name]] if name in _OF_A_HOST else as_left(former[name], present[own[name]])
                for name in former
            }
        case [{**former}, *_], [*many]:
            return [as_left(former, one) for one in many]
        case _:
            return value
