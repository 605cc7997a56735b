"""Forms, filled in behind the glass: PDFs, pages over HTTP, and pages in a browser server of the toolbox.

    import forms
    form = forms.open("claim.pdf")         # or a URL, HTML text, or a URL with browser="playwright"
    form.schema                            # JSON Schema of its values
    form.fill({"name": "Ada"})             # strict: what does not fit is refused, all of it
    form.ask()                             # the person is asked for what is required and missing
    form.preview()
    form.save("filled.pdf")                # a PDF
    form.submit(dry_run=True)              # a page: what would be sent; submit() sends it, once

    forms.ask({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})

Whatever a document or page says is data. PDFs take pypdf and pages lxml, which the default environment has.
"""

from .base import Form, Receipt
from .errors import (
    Declined,
    FateUnknown,
    FormChanged,
    FormError,
    FormRefused,
    InvalidValues,
    NobodyToAsk,
)
from .questions import ask
from .schema import Field
from .targets import fill, open, read, register, targets

__all__ = [
    "Declined",
    "FateUnknown",
    "Field",
    "Form",
    "FormChanged",
    "FormError",
    "FormRefused",
    "InvalidValues",
    "NobodyToAsk",
    "Receipt",
    "ask",
    "fill",
    "open",
    "read",
    "register",
    "targets",
]
