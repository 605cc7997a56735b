"""What people see of sessions, and what they may do: one contract (`base.py`), for this process and for others.

`local.py` looks at the sessions of this process, `remote.py` at those of other servers over their sockets, `history.py`
reads the journal for both. The HTTP API and the console know the contract and nothing below it.
"""
