"""The supervisor's process, which keeps kernels alive between two servers.

It is loaded by path, under a package name of its own, and needs nothing but Python's standard library.
"""
