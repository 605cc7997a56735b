"""The process that makes the sandboxes which forked sessions enter, as bubblewrap would, without starting it.

It is loaded by path, under a package name of its own, and needs nothing but Python's standard library.
"""
