"""Sessions that compute on a real GPU of NVIDIA. `BELLJAR_GPU_PYTHON` names a Python that has torch for it.

CuPy, JAX and nvcc are used where they are there. Run it alone: pytest -n 0 tests/sessions/test_real_gpus.py.
"""

import asyncio
import os
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from belljar.executions.cell import make_cell
from belljar.kernels.base import pid_of
from belljar.models import ExecutionResult
from belljar.runtime import Runtime, open_runtime
from belljar.sandboxes.gpus import find_gpus
from belljar.sessions.fork import BY_STATE
from belljar.sessions.session import Session
from belljar.settings import Settings
from waiting import until

PYTHON = os.environ.get("BELLJAR_GPU_PYTHON", "")
OWNER = "somebody"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not find_gpus(), reason="this host has no GPU"),
    pytest.mark.skipif(not PYTHON, reason="BELLJAR_GPU_PYTHON names no Python with torch"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def runtime() -> AsyncGenerator[Runtime]:
    with TemporaryDirectory(prefix="belljar-gpu-") as folder:
        Path(folder).chmod(0o711)
        settings = Settings(
            environment=PYTHON,
            data_directory=Path(folder),
            gpus=["all"],
            preload=["numpy", "torch"],
            pool_size=0,
            memory_mb=32_768,
            disk_mb=8_192,
            max_processes=4_096,
            max_open_files=4_096,
        )
        async with open_runtime(settings) as runtime:
            assert await runtime.starter.wait_until_warm(PYTHON)
            yield runtime


async def ran(session: Session, code: str, *, is_fine: bool = True) -> ExecutionResult:
    execution = session.submit(make_cell(session.settings, code))
    await execution.wait(120)
    result = execution.result()
    assert result.success is is_fine, (result.error, result.cause, result.traceback[-5:])
    return result


def session_of(runtime: Runtime, gpus: int | None = None) -> Session:
    return runtime.sessions.create(OWNER, gpus=gpus)


async def test_nvidia_smi_names_the_gpu_of_the_session(runtime: Runtime) -> None:
    session = session_of(runtime)
    result = await ran(
        session, "import subprocess; print(subprocess.run(['nvidia-smi', '-L'], text=True, capture_output=True))"
    )
    (gpu,) = session.gpus.of(session.id)
    assert gpu.uuid in result.stdout
    devices = (await ran(session, "import os; sorted(os.listdir('/dev'))")).result or ""
    assert "nvidia-caps" not in devices
    assert "nvidia-uvm-tools" not in devices


async def test_a_session_without_a_gpu_has_none(runtime: Runtime) -> None:
    assert (await ran(session_of(runtime, 0), "import torch; torch.cuda.is_available()")).result == "False"


async def test_torch_computes_and_the_memory_is_told(runtime: Runtime) -> None:
    session = session_of(runtime)
    result = await ran(session, "import torch; x = torch.ones(1 << 28, device='cuda'); (x.sum().item(), x.device.type)")
    assert result.result == "(268435456.0, 'cuda')"
    assert result.usage.gpu_memory_mb > 1_024
    assert session.info().gpu_memory_mb > 1_024


@pytest.mark.parametrize(
    ("module", "code", "expected"),
    [
        ("cupy", "import cupy; int((cupy.arange(1_000_000) % 7).sum())", "2999997"),
        (
            "jax",
            "import jax, jax.numpy as jnp; ones = jnp.ones((64, 64))\n"
            "(jax.devices()[0].platform, float((ones @ ones)[0, 0]))",
            "('gpu', 64.0)",
        ),
    ],
)
async def test_other_libraries_compute_too(runtime: Runtime, module: str, code: str, expected: str) -> None:
    if subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{module} is not there")
    assert (await ran(session_of(runtime), code)).result == expected


CUDA_PROGRAM = r"""
import pathlib, subprocess
pathlib.Path("square.cu").write_text(r'''
#include <cstdio>
__global__ void square(float *x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= x[i]; }
int main() {
  const int n = 1 << 20; float *x; cudaMalloc(&x, n * sizeof(float));
  float *h = new float[n]; for (int i = 0; i < n; ++i) h[i] = 3.0f;
  cudaMemcpy(x, h, n * sizeof(float), cudaMemcpyHostToDevice);
  square<<<(n + 255) / 256, 256>>>(x, n);
  cudaMemcpy(h, x, n * sizeof(float), cudaMemcpyDeviceToHost);
  printf("%s %g %g\n", cudaGetErrorString(cudaGetLastError()), h[0], h[n - 1]); return 0;
}
''')
command = ["/usr/local/cuda/bin/nvcc", "-arch=native", "-o", "square", "square.cu"]
built = subprocess.run(command, capture_output=True, text=True)
built.stderr[-500:] or subprocess.run(["./square"], capture_output=True, text=True).stdout
"""


async def test_a_cuda_program_is_built_and_run_inside(runtime: Runtime) -> None:
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("nvcc is not there")
    assert (await ran(session_of(runtime), CUDA_PROGRAM)).result == "'no error 9 9\\n'"


async def test_two_sessions_compute_at_once_and_each_counts_its_own_memory(runtime: Runtime) -> None:
    first, second = session_of(runtime), session_of(runtime)
    work = "import torch\nx = torch.ones({size} << 20, device='cuda')\nfor _ in range(50): x = x * 1.0\nfloat(x[0])"
    results = await asyncio.gather(ran(first, work.format(size=256)), ran(second, work.format(size=512)))
    assert [result.result for result in results] == ["1.0", "1.0"]
    small, large = first.info().gpu_memory_mb, second.info().gpu_memory_mb
    assert 1_024 < small < large - 1_000


async def test_out_of_gpu_memory_is_typed_and_variables_are_kept(runtime: Runtime) -> None:
    session = session_of(runtime)
    await ran(session, "import torch; kept = torch.ones(4, device='cuda')")
    result = await ran(session, "torch.empty(1 << 40, dtype=torch.uint8, device='cuda')", is_fine=False)
    assert (result.status, (result.cause or "").partition(":")[0]) == ("error", "gpu_out_of_memory")
    assert (await ran(session, "kept.sum().item()")).result == "4.0"


async def test_a_session_that_ends_leaves_no_memory_behind(runtime: Runtime) -> None:
    session = session_of(runtime)
    await ran(session, "import torch; x = torch.ones(1 << 29, device='cuda')")
    pid = pid_of(session.session_kernel.kernel)
    monitor = runtime.starter.gpus.monitor
    assert monitor.processes()[pid] > 2_048
    await runtime.sessions.clear(session.id, OWNER)
    await until(lambda: pid not in monitor.processes())


async def test_a_death_says_what_was_on_the_gpu(runtime: Runtime) -> None:
    session = session_of(runtime)
    await ran(session, "import torch, os, time; x = torch.ones(1 << 28, device='cuda')")
    result = await ran(session, "time.sleep(1.2); os._exit(3)", is_fine=False)
    assert "MB that it held on its GPU are free again" in (result.cause or "")


async def test_a_fork_of_a_session_with_tensors_on_the_gpu_has_them_on_the_gpu(runtime: Runtime) -> None:
    session = session_of(runtime)
    await ran(session, "import torch; x = torch.arange(1 << 20, device='cuda'); layer = torch.nn.Linear(8, 8).cuda()")
    fork, told = await runtime.sessions.fork(session.id, OWNER)
    assert told.lost == [BY_STATE]
    assert (
        await ran(fork, "x.device.type, int(x[-1]), layer.weight.device.type")
    ).result == "('cuda', 1048575, 'cuda')"
    await ran(fork, "x += 1")
    assert (await ran(session, "int(x[-1])")).result == "1048575"


async def test_a_session_sleeps_with_its_tensors_and_wakes_with_or_without_a_gpu(runtime: Runtime) -> None:
    session = session_of(runtime)
    await ran(session, "import torch; x = torch.arange(1 << 20, device='cuda')")
    await runtime.sessions.endings.hibernate(session, "slept")
    woken = await runtime.sessions.reach(session.id, OWNER)
    assert (await ran(woken, "x.device.type, int(x[-1])")).result == "('cuda', 1048575)"
    await runtime.sessions.endings.hibernate(woken, "slept again")
    runtime.starter.gpus.request(session.id, 0)
    without = await runtime.sessions.reach(session.id, OWNER)
    result = await ran(without, "print(x.device.type, int(x[-1]))")
    assert "cpu 1048575" in result.stdout
    assert "in the host's memory now" in "".join(result.output)


async def test_a_rewind_goes_back_to_before_the_gpu_was_used_and_no_later(runtime: Runtime) -> None:
    session = session_of(runtime)
    await ran(session, "y = 1")
    used = await ran(session, "import torch; x = torch.ones(4, device='cuda')")
    last = await ran(session, "y = 2")
    with pytest.raises(Exception, match="it uses a GPU"):
        await session.rewind(last.execution_id)
    await session.rewind(used.execution_id)
    assert (await ran(session, "y")).result == "1"
    assert (await ran(session, "import torch; torch.ones(2, device='cuda').sum().item()")).result == "2.0"


async def test_an_interrupt_stops_work_on_the_gpu_and_keeps_variables(runtime: Runtime) -> None:
    session = session_of(runtime)
    await ran(session, "import torch; x = torch.randn(4096, 4096, device='cuda')")
    execution = session.submit(
        make_cell(session.settings, "while True: x = x @ x; x = x / x.norm(); torch.cuda.synchronize()")
    )
    await until(lambda: execution.has_started)
    await session.interrupt()
    assert execution.result().status == "interrupted"
    assert (await ran(session, "tuple(x.shape)")).result == "(4096, 4096)"


async def test_pooled_sessions_hold_a_context(runtime: Runtime) -> None:
    settings = runtime.settings.model_copy(
        update={"gpu_contexts": 1, "data_directory": runtime.settings.data_directory / "second"}
    )
    async with open_runtime(settings) as other:
        await until(lambda: other.sessions.pool.is_full)
        session = other.sessions.create(OWNER)
        assert session.info().gpu_memory_mb > 100
        result = await ran(session, "import torch; torch.ones(3, device='cuda').sum().item()")
        assert (result.result, result.usage.wall_s < 0.2) == ("3.0", True)
