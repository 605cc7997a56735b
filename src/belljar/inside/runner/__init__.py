"""The runner: IPython's shell in the sandbox, connected to the host by one socket and two pipes.

It imports nothing of belljar, so that it runs in any environment that has IPython; the host loads it by path, as the
package `belljar_runner`. It is single-threaded and makes no selector, socket or lock before `Runner.attach`, so that a
zygote can build the shell once and fork kernels from it.
"""
