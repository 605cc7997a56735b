"""Control groups of sessions: made with their limits, joined, read, killed and removed. Both worlds, v1 and v2.

A server makes one group for itself, `belljar-<pid>-<token>`, held by a lock that ends with it (`locks.py`), and below
that one for each sandbox (`groups.py`). A group is what `base.py` says, in the old hierarchy (`old.py`) or in the
unified one (`unified.py`). Where groups may be made is `hierarchy.py`'s; what is said about a limit that was hit,
`limits.py`'s.
"""

from belljar.sandboxes.cgroups.base import Group
from belljar.sandboxes.cgroups.folders import MEBIBYTE
from belljar.sandboxes.cgroups.groups import Groups, adopt
from belljar.sandboxes.cgroups.locks import PREFIX
from belljar.sandboxes.cgroups.old import OldGroup

__all__ = ["MEBIBYTE", "PREFIX", "Group", "Groups", "OldGroup", "adopt"]
