"""What the runner knows of GPUs: whether this process uses one, making a context ahead, tensors without their GPU.

A process that has opened a GPU's driver cannot be forked: the fork would have the memory, and no connection to the
driver. Loads no library that the session has not loaded itself, except where it is asked to make a context.
"""

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

HELD = "it uses a GPU, and what the GPU's driver holds for a process cannot be copied"
MOVED = "they are in the host's memory now, because there is no GPU with room for them here"
# The file that a process opens when it starts to compute, and what says that this sandbox has such a GPU.
_DRIVERS = {"/dev/nvidiactl": "/dev/nvidia-uvm", "/dev/kfd": "/dev/kfd"}


def is_in_use() -> bool:
    """Return whether this process has opened the driver of a GPU to compute on it."""
    wanted: set[str] = set()
    for shown, opened in _DRIVERS.items():  # no comprehension, see `fork.names_in`
        if os.access(shown, os.F_OK):
            wanted.add(opened)
    if not wanted:
        return False
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) in wanted:
                return True
    return False


def make_context() -> str:
    """Make a context on the first GPU, as the first cell that uses it would; return why that failed, if it did."""
    try:
        if "torch" in sys.modules:
            _warm_torch(sys.modules["torch"])
        else:
            _retain_primary_context()
    except Exception as error:  # whatever the environment's library raises
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def _warm_torch(torch: Any) -> None:
    """Load what torch loads with its first tensor and its first product, and hold no memory for it."""
    tensor = torch.ones(64, 64, device="cuda")
    (tensor @ tensor).sum().item()
    del tensor
    torch.cuda.empty_cache()


def _retain_primary_context() -> None:
    """Make the context that CuPy, JAX, Numba and torch share, by the driver's own library."""
    import ctypes

    library = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    for call, arguments in ((library.cuInit, (0,)), (library.cuDevicePrimaryCtxRetain, (ctypes.byref(context), 0))):
        if status := call(*arguments):
            raise OSError(f"CUDA error {status}")


class TensorLoader:
    """Loads tensors that torch saved from a GPU; into the host's memory if there is no GPU now."""

    NAME = ("torch.storage", "_load_from_bytes")

    def __init__(self) -> None:
        self.moved = 0
        """How many were moved."""

    def load(self, data: bytes) -> Any:
        """Take the place of torch's function of that name."""
        import io

        module, name = self.NAME
        try:
            return getattr(importlib.import_module(module), name)(data)
        except RuntimeError:
            torch: Any = importlib.import_module("torch")
            storage = torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")
            self.moved += 1
            return storage


TENSORS = TensorLoader()
"""The loader of this process, which loads a state at most once."""
