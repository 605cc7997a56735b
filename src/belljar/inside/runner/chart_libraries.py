"""Charts of Bokeh and Altair as pages that open without a network, as Plotly's are (`rich_output.py`).

The JavaScript is that of the packages which the session has: Bokeh has its own, Altair's is in vl-convert-python, which
draws pictures too. Nothing is imported here before the code of a cell has a chart to show.
"""

import contextlib
import importlib
import io
import re
from typing import Any

_ALTAIR = [f"altair.vegalite.v{version}.api" for version in (4, 5, 6, 7)]
_BOKEH = [("bokeh.models.layouts", "LayoutDOM"), ("bokeh.models.ui.ui_element", "UIElement")]
_IMPORTS_BOKEH = re.compile(r"^[ \t]*(?:from|import)[ \t]+bokeh\b", re.MULTILINE)
BOKEH_WORDS = "<Bokeh figure: a page without a picture, which people can open. matplotlib draws pictures.>"
ALTAIR_WORDS = (
    "<Altair chart: a page that needs the network for its scripts, and so shows nothing here, without a picture. "
    "Install vl-convert-python and show the chart again.>"
)
# A figure that is wider than its window is drawn anew for it, instead of being cut off or shrunk with its letters.
_FITS = (
    "<script>addEventListener('load',()=>{const fit=()=>{for(const page of Bokeh.documents)for(const root of "
    "page.roots())if(!root.sizing_mode&&root.width>innerWidth)root.sizing_mode='scale_width'};fit();"
    "setTimeout(fit,200)})</script></body>"
)
_state = {"shows_bokeh": False}


def register_charts(display_formatter: Any) -> None:
    """Have charts that are displayed, or the value of a cell, shown as such pages."""
    formatter = display_formatter.mimebundle_formatter
    for module in _ALTAIR:
        formatter.for_type_by_name(module, "TopLevelMixin", _altair_forms)
    for module, name in _BOKEH:
        formatter.for_type_by_name(module, name, _bokeh_forms)


def _altair_forms(chart: Any) -> Any:
    altair = importlib.import_module("altair")
    if altair.renderers.active != "default":  # the code has chosen another form
        return chart._repr_mimebundle_()
    try:
        importlib.import_module("vl_convert")
    except ImportError:
        forms: Any = chart._repr_mimebundle_()
        return {**forms, "text/plain": ALTAIR_WORDS} if hasattr(forms, "keys") else forms
    picture = io.BytesIO()
    chart.save(picture, format="png", scale_factor=2)
    return {"image/png": picture.getvalue(), "text/html": chart.to_html(inline=True)}


def _bokeh_forms(figure: Any) -> Any:
    embed, resources = importlib.import_module("bokeh.embed"), importlib.import_module("bokeh.resources")
    page = embed.file_html(figure, resources.INLINE, title="Bokeh")
    before, end, after = page.rpartition("</body>")
    return {"text/html": f"{before}{_FITS}{after}" if end else page, "text/plain": BOKEH_WORDS}


def imports_bokeh(code: str) -> bool:
    """Return whether code with the letters `bokeh` imports it."""
    return _IMPORTS_BOKEH.search(code) is not None


def show_bokeh() -> None:
    """Have `bokeh.io.show` display figures, as after `output_notebook()`; otherwise it looks for a browser."""
    if _state["shows_bokeh"]:
        return
    # A session's own file of that name may raise anything.
    with contextlib.suppress(Exception, SystemExit):
        notebook: Any = importlib.import_module("bokeh.io.notebook")
        notebook.install_notebook_hook("jupyter", _load_nothing, _show_document, None, overwrite=True)
        importlib.import_module("bokeh.io.state").curstate().output_notebook("jupyter")
        _state["shows_bokeh"] = True


def _load_nothing(*_: Any, **__: Any) -> None:
    """Do nothing for `output_notebook()`: each page has its own scripts."""


def _show_document(shown: Any, *_: Any, **__: Any) -> None:
    display: Any = importlib.import_module("IPython.display").display
    display(_bokeh_forms(shown), raw=True)
