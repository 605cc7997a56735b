"""Any installed Jupyter kernel as one of ours.

Down from the start: `starting` finds a meeting place and spawns, `kernel` runs cells, `channels` carries messages both
ways, `messages` checks them, `zmtp` is the wire. Imported only when such a kernel is used: jupyter_client is slow to
load.
"""

from belljar.kernels.jupyter.launch import start_jupyter
from belljar.kernels.jupyter.specs import KernelSpec, find_kernelspec, kernel_environment, kernel_readable

__all__ = ["KernelSpec", "find_kernelspec", "kernel_environment", "kernel_readable", "start_jupyter"]
