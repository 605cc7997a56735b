"""The way out of a sandbox: which hosts a session may reach, and the proxy that takes it there and nowhere else.

It knows sockets, names and addresses; it knows nothing of kernels, sandboxes or packages.
"""
