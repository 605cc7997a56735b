"""Several servers that answer as one: any connection reaches any session, on one machine or on many.

`peer.py` is one other server, `peers.py` finds and chooses among all, `routing.py` decides which of them a request is
for, `relay.py` passes it on, `legacy_calls.py` does so for clients of 2025's protocol, and `inner_app.py` answers what
the others pass on to us.
Between machines, `addresses.py` says where they are, `assertions.py` how they believe each other, `identity.py` what
they have to have in common, `known_hosts.py` which there were before, and `losses.py` what goes on elsewhere.
A server that is alone imports nothing of this.
"""
