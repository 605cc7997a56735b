"""A person attaches to a live session: sees the output of its cells, whoever runs them, and runs more.

`local` attaches to a session of this process, `remote` to one of another process, where `server` answers; `messages`
has the form of what they exchange. Cells of a person take their turn like everyone's, and the journal says whose they
are.
"""

from belljar.attachments.base import AttachedSession
from belljar.attachments.local import LocalAttachment, attach
from belljar.attachments.remote import open_attachment, open_served
from belljar.attachments.server import serve_operators

__all__ = [
    "AttachedSession",
    "LocalAttachment",
    "attach",
    "open_attachment",
    "open_served",
    "serve_operators",
]
