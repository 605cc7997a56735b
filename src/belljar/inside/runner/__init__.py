"""What runs inside the sandbox: IPython's shell behind one socket and two pipes.

It imports nothing of belljar, so that it runs in any environment that has IPython; the host loads it by path. It is
single-threaded and makes no event loop, socket or lock before `Runner.attach`, so that a process can build the shell
once and fork sessions from it.
"""
