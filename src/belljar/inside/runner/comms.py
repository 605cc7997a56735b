"""Comms: messages between objects of the session, such as widgets, and their views in Jupyter's front ends.

Libraries send them through the package `comm`, which is connected to the host whenever a cell imports it; a session
whose environment lacks the package has no comms. Does not know the front ends, nor whether there are any.
"""

# `comm` belongs to the session's environment, and may not be there.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import base64
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

from .channel import MAX_DEPTH, MAX_VALUES, has_too_many_values, is_too_deep

# The limits of the host and of a frame. Code that exceeds them gets an error here; the host would end its session.
MAX_BUFFERS_BYTES = 16 * 1024 * 1024
MAX_BUFFERS = 1_000
MAX_NAME = 200
MAX_OPEN = 10_000
# Stands for the id of the front end's request, because each front end has an id of its own for it.
THIS_REQUEST = "belljar:this-request"

Emit = Callable[[dict[str, Any]], None]


_claiming: set[str] = set()
"""The comms of `Output` widgets that show the outputs of the current request."""


def reset_claims() -> None:
    """Forget all claims, because no widget claims the outputs of a new request yet."""
    _claiming.clear()


def is_claimed() -> bool:
    """Return whether a widget shows the current outputs."""
    return bool(_claiming)


class CommKernelStub:
    """The object at `get_ipython().kernel`; pandas tests whether it exists, `Output` widgets ask it for the request."""

    def __init__(self) -> None:
        self.language_info = {"name": "python", "version": sys.version.split()[0], "mimetype": "text/x-python"}

    def get_parent(self, *_: Any) -> dict[str, Any]:
        """Return the current request, as Jupyter's parent message."""
        return {"header": {"msg_id": THIS_REQUEST}}


class _Finder:
    """A finder on `sys.meta_path` that connects the package `comm` when it is imported."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def __repr__(self) -> str:
        return "<finder of comm>"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "comm":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _connect(module, self._emit)

            loader.exec_module = exec_module
        return spec


def install(emit: Emit) -> None:
    """Send the messages of the session's comms through `emit` from now on."""
    sys.meta_path.insert(0, _Finder(emit))  # type: ignore[arg-type]
    if "comm" in sys.modules:
        _connect(sys.modules["comm"], emit)


def _connect(module: Any, emit: Emit) -> None:
    base = getattr(getattr(module, "base_comm", None), "BaseComm", None)
    if base is None:
        return  # a module of the session with the same name

    class Comm(base):
        """A comm whose messages go to the host."""

        kernel = CommKernelStub()

        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
        ) -> None:
            message: dict[str, Any] = {
                "type": "comm",
                "kind": msg_type,
                "comm_id": _name(self.comm_id),
                "target": _name(keys.get("target_name") or ""),
                "data": _dictionary(data),
                "metadata": _dictionary(metadata),
                "buffers": _encoded(buffers or ()),
            }
            _note_claim(message["comm_id"], message["data"].get("state"))
            emit(message)

    module.create_comm = Comm


def _note_claim(comm_id: str, state: Any) -> None:
    if isinstance(state, dict) and "msg_id" in state:
        (_claiming.add if state["msg_id"] == THIS_REQUEST else _claiming.discard)(comm_id)


# The last state of widgets, as text: a page or a notebook that is read later has nobody who could tell of more

VIEW = "application/vnd.jupyter.widget-view+json"
MAX_SHOWN = 100
_LONGEST_STATE = 500
_shown: "dict[str, dict[str, Any]]" = {}
"""What was shown of the latest widgets, by the ids of their comms."""


def display_id_of(data: "dict[str, Any]") -> "str | None":
    """Return the id under which a widget that is shown now is updated; None for what is no widget."""
    view = data.get(VIEW)
    model_id = view.get("model_id") if isinstance(view, dict) else None
    if not isinstance(model_id, str) or len(model_id) > MAX_NAME or "text/plain" not in data:
        return None
    _shown.pop(model_id, None)
    _shown[model_id] = data
    if len(_shown) > MAX_SHOWN:
        del _shown[next(iter(_shown))]
    return f"widget-{model_id}"


def tell_states(emit: Emit) -> None:
    """Show each widget anew whose text has changed since it was shown."""
    if not _shown:
        return
    widgets: Any = sys.modules.get("ipywidgets.widgets.widget")
    instances = getattr(widgets, "_instances", None)
    for model_id, data in [*_shown.items()]:
        widget = instances.get(model_id) if isinstance(instances, dict) else None
        if widget is None:
            del _shown[model_id]  # it was closed
            continue
        try:
            text = repr(widget)[:_LONGEST_STATE]
        except Exception:
            continue  # a widget of the session may raise anything
        if text != data["text/plain"]:
            data["text/plain"] = text
            emit({"type": "display", "data": data, "display_id": f"widget-{model_id}", "update": True})


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise ValueError(f"a comm's id and its target are strings of at most {MAX_NAME} characters")
    return value


def _dictionary(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"data of a comm is a dict here, not {type(value).__name__}")
    if is_too_deep(value):
        raise ValueError(f"data of a comm is nested at most {MAX_DEPTH} deep")
    if has_too_many_values(value):
        raise ValueError(f"data of a comm has at most {MAX_VALUES:,} values")
    return value or {}


def _encoded(buffers: Any) -> "list[str]":
    parts = [bytes(buffer) for buffer in buffers]
    size = sum(map(len, parts))
    if size > MAX_BUFFERS_BYTES or len(parts) > MAX_BUFFERS:
        raise ValueError(
            f"a comm's message has {len(parts):,} buffers of {size:,} bytes; "
            f"at most {MAX_BUFFERS:,} of {MAX_BUFFERS_BYTES:,} bytes can be sent"
        )
    return [base64.b64encode(part).decode("ascii") for part in parts]


def deliver(message: dict[str, Any], emit: Emit) -> None:
    """Pass a front end's message to its comm; answer the opening of an unknown target with a close."""
    content, kind = message["content"], message["kind"]
    manager = _manager()
    known: Any = () if manager is None else manager.targets if kind == "comm_open" else manager.comms
    if content["target_name" if kind == "comm_open" else "comm_id"] not in known:
        if kind == "comm_open":
            emit({"type": "comm", "kind": "comm_close", "comm_id": _name(content["comm_id"]), "data": {}})
        return
    jupyter_message = {
        "header": {"msg_id": THIS_REQUEST, "msg_type": kind},
        "content": content,
        "metadata": message["metadata"],
        "buffers": [memoryview(base64.b64decode(buffer)) for buffer in message["buffers"]],
    }
    getattr(manager, kind)(None, None, jupyter_message)


def opened() -> dict[str, str]:
    """Return the targets of the open comms by comm id."""
    manager = _manager()
    comms = list(manager.comms.items()) if manager is not None else []
    return {
        comm_id: str(comm.target_name)[:MAX_NAME]
        for comm_id, comm in comms[-MAX_OPEN:]
        if isinstance(comm_id, str) and len(comm_id) <= MAX_NAME and hasattr(comm, "target_name")
    }


def _manager() -> Any:
    """Return the manager of the session's comms; None while nothing has imported `comm`."""
    module: Any = sys.modules.get("comm")
    return module.get_comm_manager() if hasattr(module, "get_comm_manager") else None
