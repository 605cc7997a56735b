"""Network access from a sandbox: which hosts a session may reach, and the proxy that connects it to no others.

It knows sockets, names and addresses; it knows nothing of kernels, sandboxes or packages.
"""
