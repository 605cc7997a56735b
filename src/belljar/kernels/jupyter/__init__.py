"""Any installed Jupyter kernel, behind the contract of `kernels/base.py`.

`specs` finds kernelspecs, `launch` writes the connection file and starts the process, `kernel` runs cells, `channels`
carries messages both ways, `messages` signs and checks them, `zmtp` is the protocol below. Imported only when such a
kernel is used, because jupyter_client is slow to load.
"""

from belljar.kernels.jupyter.launch import start_jupyter
from belljar.kernels.jupyter.specs import KernelSpec, find_kernelspec, kernel_environment, kernel_readable

__all__ = ["KernelSpec", "find_kernelspec", "kernel_environment", "kernel_readable", "start_jupyter"]
