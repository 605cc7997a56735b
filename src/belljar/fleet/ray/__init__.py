"""Ray as what starts a fleet's machines, watches and counts them; it carries no call.

`cluster.py` starts and ends Ray's own processes on a machine, `actors.py` is what runs in Ray: an agent on each node
and one controller, whose decisions `membership.py` makes. The agent keeps the machine's server running (`host.py`) and
writes the list of all machines into a file, which is all that servers know of Ray: none of them imports it.
"""
