"""Several servers of one machine that answer as one: any connection reaches any session.

`peers.py` knows the other servers, `routing.py` decides which of them a request is for, `relay.py` passes it on,
`legacy_calls.py` does so for clients of 2025's protocol, and `inner_app.py` answers what the others pass on to us.
A server that is alone imports nothing of this.
"""
