"""A small process that owns the sandboxes of a server, so that they outlive it, and the server's line to it.

`apart/` is that process: it imports nothing of ours and nothing that is not Python's own. It knows numbers, descriptors
and keys; what they mean is known to those who hand them over.
"""

from belljar.supervisor.client import Deposit, NoSupervisor, SupervisorClient, open_supervisor
from belljar.supervisor.discovery import has_supervisor

__all__ = ["Deposit", "NoSupervisor", "SupervisorClient", "has_supervisor", "open_supervisor"]
