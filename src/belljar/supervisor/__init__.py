"""A small process that owns the sandboxes of a server, so that they outlive it, and the server's line to it.

`apart/` is that process: it imports nothing of ours and nothing that is not Python's own. It knows numbers, descriptors
and keys; what they mean is known to those who hand them over.
"""

from belljar.supervisor.finding import has_supervisor
from belljar.supervisor.line import Deposit, NoSupervisor, Supervisor, open_supervisor

__all__ = ["Deposit", "NoSupervisor", "Supervisor", "has_supervisor", "open_supervisor"]
