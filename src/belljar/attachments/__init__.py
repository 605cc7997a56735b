"""A person's hold on a live session: what its cells say, whoever runs them, and a way to run more.

`local` holds a session of this process, `remote` one of a server that `serving` answers for; both speak the words of
`messages`. Cells of a person take their turn like everyone's, and the journal says whose they are.
"""

from belljar.attachments.base import AttachedSession
from belljar.attachments.local import LocalAttachment, attach
from belljar.attachments.remote import open_attachment, open_served
from belljar.attachments.server import serve_operators

__all__ = ["AttachedSession", "LocalAttachment", "attach", "open_attachment", "open_served", "serve_operators"]
