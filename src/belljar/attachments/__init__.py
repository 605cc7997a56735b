"""A person attaches to a live session: sees the output of its cells, whoever runs them, and runs more.

`local` attaches to a session of this process, `remote` to one of another process, over the socket of its server;
`messages` has the form of what they exchange. Cells of a person take their turn like everyone's, and the journal says
whose they are.
"""

from belljar.attachments.local import LocalAttachment, attach
from belljar.attachments.messages import AttachedSession
from belljar.attachments.remote import open_attachment, open_served

__all__ = [
    "AttachedSession",
    "LocalAttachment",
    "attach",
    "open_attachment",
    "open_served",
]
