"""Kernels, which run cells and keep variables between them: our own IPython runner, and Jupyter's kernels."""
