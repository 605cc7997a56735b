"""What a rich output is turned into before it leaves: JSON-able values, and Plotly figures as a page and a picture.

Plotly hands out its own JSON, which only a notebook front end can draw. The page is self-contained: it opens with no
network. The picture needs kaleido and a browser it can start; without one there is none, and that is found out once.
"""

import base64
import importlib
from typing import Any

PLOTLY = "application/vnd.plotly.v1+json"
_state = {"has_picture": True}


def prepared(data: dict[str, Any]) -> dict[str, Any]:
    """The bundle as it goes to the host."""
    if PLOTLY in data:
        data = {**data, **_drawn(data[PLOTLY])}
        del data[PLOTLY]
    return {mime: _encoded(value) for mime, value in data.items()}


def _encoded(value: Any) -> Any:
    return base64.b64encode(value).decode("ascii") if isinstance(value, (bytes, bytearray)) else value


def _drawn(figure: dict[str, Any]) -> dict[str, Any]:
    io = importlib.import_module("plotly.io")
    figure = {key: figure[key] for key in ("data", "layout", "frames") if key in figure}
    drawn: dict[str, Any] = {"text/html": io.to_html(figure, include_plotlyjs=True, full_html=True, validate=False)}
    if _state["has_picture"]:
        try:
            drawn["image/png"] = io.to_image(figure, format="png", validate=False)
        except Exception:
            _state["has_picture"] = False
    return drawn
