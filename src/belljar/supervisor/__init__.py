"""The server's client of the supervisor, a small process that owns a server's sandboxes so that they outlive it.

The process itself is in `inside/supervisor/`; it imports nothing but Python's standard library. It knows numbers,
descriptors and keys; only those who deposit them know what they mean.
"""

from belljar.supervisor.client import Deposit, NoSupervisor, SupervisorClient, open_supervisor
from belljar.supervisor.deposit_format import unreadable
from belljar.supervisor.discovery import has_supervisor

__all__ = ["Deposit", "NoSupervisor", "SupervisorClient", "has_supervisor", "open_supervisor", "unreadable"]
