"""What one execution does with its session's GPUs: how much memory they held, and whether they ran out of it.

Only executions of sessions that have a GPU use this. Knows nothing of how an execution is run.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from belljar.executions.outcome import Outcome
from belljar.kernels.base import Kernel, pid_of
from belljar.outputs.events import Event, Raised
from belljar.provisioning.gpus import SessionGpus
from belljar.sandboxes.base import Incident

# How libraries say that a GPU has no memory left: torch and CuPy by the error's name, JAX, Numba and CUDA itself in
# words. MemoryError is not among them, because it means the host's memory.
_NAMES = ("OutOfMemoryError",)
_MESSAGES = (
    *("CUDA out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "HIP out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "RESOURCE_EXHAUSTED: Out of memory"),
)


class GpuUse:
    """The GPU memory of one execution."""

    def __init__(self, gpus: SessionGpus, session_id: str) -> None:
        self._gpus = gpus
        self._session_id = session_id
        self._has_raised = self._is_short = False

    @asynccontextmanager
    async def watching(self, kernel: Kernel, outcome: Outcome) -> AsyncGenerator[None]:
        """Record in the outcome how much GPU memory the session holds until the block ends."""
        async with self._gpus.watching(self._session_id, pid_of(kernel)) as peak:
            try:
                yield
            finally:
                outcome.gpu_memory_mb = peak.mb
        outcome.gpu_memory_mb = max(outcome.gpu_memory_mb, peak.mb)

    def on_event(self, event: Event) -> None:
        """Note an error of the cell."""
        if isinstance(event, Raised):
            self._has_raised, self._is_short = True, is_shortage(event.name, event.message)

    async def incidents(self, kernel: Kernel) -> list[Incident]:
        """Return what became of the GPU, if the cell raised: it was out of memory, or was taken away."""
        if not self._has_raised:
            return []
        if self._is_short:
            return [await self._gpus.shortage(self._session_id, pid_of(kernel))]
        loss = await asyncio.to_thread(self._gpus.loss, self._session_id)
        return [loss] if loss is not None else []


def is_shortage(name: str, message: str) -> bool:
    """Return whether an error of a cell says that its GPU has no memory left."""
    return name.rpartition(".")[2] in _NAMES or any(text in message for text in _MESSAGES)


def with_gpu_memory(cause: str, held_mb: float) -> str:
    """Return the cause of a kernel's death with the GPU memory that went with it."""
    return f"{cause}; the {held_mb:,.0f} MB that it held on its GPU are free again" if held_mb else cause
