"""Comms: messages between objects of the session, such as widgets, and their views in Jupyter's front ends.

The package `comm` is where libraries look for a way out. It is given one whenever a cell imports it; a session whose
environment lacks it has no comms. Knows neither front ends nor whether there are any.
"""

# `comm` belongs to the session's environment, and may not be there.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import base64
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

from .channel import MAX_DEPTH, is_too_deep

# What the host and the frames allow; said to the code that goes beyond it, rather than ending its session.
MAX_BUFFERS_BYTES = 16 * 1024 * 1024
MAX_BUFFERS = 1_000
MAX_NAME = 200
MAX_OPEN = 10_000
# In place of the id of the front end's request, which every front end has its own for.
THIS_REQUEST = "belljar:this-request"

Emit = Callable[[dict[str, Any]], None]


_claiming: set[str] = set()
"""Comms of `Output` widgets inside of which the request's outputs are shown."""


def reset_claims() -> None:
    """A new request: nothing claims its outputs yet."""
    _claiming.clear()


def is_claimed() -> bool:
    """Whether what is shown now is shown inside a widget."""
    return bool(_claiming)


class CommKernelStub:
    """What `get_ipython().kernel` is: pandas looks whether there is one, `Output` widgets ask it for the request."""

    def __init__(self) -> None:
        self.language_info = {"name": "python", "version": sys.version.split()[0], "mimetype": "text/x-python"}

    def get_parent(self, *_: Any) -> dict[str, Any]:
        """The request that is being answered."""
        return {"header": {"msg_id": THIS_REQUEST}}


class _Finder:
    """On `sys.meta_path`: finds `comm` where it is, and connects it once it has been imported."""

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
    """From now on comms of the session speak through `emit`."""
    sys.meta_path.insert(0, _Finder(emit))  # type: ignore[arg-type]
    if "comm" in sys.modules:
        _connect(sys.modules["comm"], emit)


def _connect(module: Any, emit: Emit) -> None:
    base = getattr(getattr(module, "base_comm", None), "BaseComm", None)
    if base is None:
        return  # a module of the session's own that has the same name

    class Comm(base):
        """One that the host carries."""

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


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise ValueError(f"a comm's id and its target are strings of at most {MAX_NAME} characters")
    return value


def _dictionary(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"data of a comm is a dict here, not {type(value).__name__}")
    if is_too_deep(value):
        raise ValueError(f"data of a comm is nested at most {MAX_DEPTH} deep")
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
    """Hand a front end's message to the comm it is for; one that nobody here knows is closed again."""
    content, kind = message["content"], message["kind"]
    manager = _manager()
    known: Any = () if manager is None else manager.targets if kind == "comm_open" else manager.comms
    if content["target_name" if kind == "comm_open" else "comm_id"] not in known:
        if kind == "comm_open":
            emit({"type": "comm", "kind": "comm_close", "comm_id": _name(content["comm_id"]), "data": {}})
        return
    told = {
        "header": {"msg_id": THIS_REQUEST, "msg_type": kind},
        "content": content,
        "metadata": message["metadata"],
        "buffers": [memoryview(base64.b64decode(buffer)) for buffer in message["buffers"]],
    }
    getattr(manager, kind)(None, None, told)


def opened() -> dict[str, str]:
    """Targets of the comms that are open, by their ids."""
    manager = _manager()
    comms = list(manager.comms.items()) if manager is not None else []
    return {
        comm_id: str(comm.target_name)[:MAX_NAME]
        for comm_id, comm in comms[-MAX_OPEN:]
        if isinstance(comm_id, str) and len(comm_id) <= MAX_NAME and hasattr(comm, "target_name")
    }


def _manager() -> Any:
    """Of the session's comms; None while nothing has imported them."""
    module: Any = sys.modules.get("comm")
    return module.get_comm_manager() if hasattr(module, "get_comm_manager") else None
