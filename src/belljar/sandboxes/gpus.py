"""The GPUs of this host: which there are, and the device nodes, libraries and programs that code needs to use one.

Reads the driver's files below `/proc`, `/dev` and `/sys`, and nothing else: it loads no library, opens no device and
knows nothing of sessions. `ROOT` is the folder that stands for the host's root, for trees that are made up.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from belljar.errors import GpuUnavailable
from belljar.sandboxes.base import Identity

ROOT = Path("/")

_INFORMATION = "proc/driver/nvidia/gpus"
_CAPABILITIES = "proc/driver/nvidia/capabilities"
_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
_MINOR = re.compile(r"DeviceFileMinor:\s*(\d+)")
_LIBRARY = "libcuda.so.1"
# Where distributions, images and container runtimes put the driver's libraries and programs.
_FOLDERS = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"),
    *("/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"),
)
_PROGRAMS = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib", "/run/opengl-driver/bin", "/opt/bin")
_SMI = "nvidia-smi"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
# The loader looks here without being told; folders of its cache are added by `_cached_folder`.
_LOADERS_OWN = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
# All GPUs of NVIDIA share these two. Not `nvidia-uvm-tools` (profilers of other processes), not `nvidia-modeset`
# (screens), and of `nvidia-caps` only what a MIG instance needs, because its first nodes change how a GPU is split.
_SHARED = ("/dev/nvidiactl", "/dev/nvidia-uvm")
# JAX and TensorFlow take most of a GPU's memory at their first array unless they are told not to, and sessions share.
_FRUGAL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
_KFD = "/dev/kfd"
_RENDER = re.compile(r"drm_render_minor (\d+)")
_UNIQUE = re.compile(r"unique_id (\d+)")
# What ROCm's runtime reads of /sys to find the GPUs. Untried.
_KFD_FILES = ("/sys/class/kfd", "/sys/devices/virtual/kfd", "/sys/module/amdgpu")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the host, or one MIG instance of it."""

    uuid: str
    """`GPU-…` or `MIG-…`; for AMD, `AMD-…`."""
    index: int
    """Its number in the order of the bus, as `nvidia-smi` counts; a MIG instance has its GPU's."""
    name: str
    nodes: tuple[str, ...]
    """The device nodes that only this one needs, as code inside sees them."""
    maker: Literal["nvidia", "amd"] = "nvidia"
    parent: str = ""
    """The GPU that a MIG instance is part of."""

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


@dataclass(frozen=True, slots=True)
class Partition:
    """A MIG instance, as the driver's library tells it: its GPU, its GPU instance and its compute instance."""

    uuid: str
    parent: str
    name: str
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True, slots=True)
class GpuView:
    """What a sandbox shows so that code in it can use some GPUs."""

    devices: Mapping[str, Path]
    """Device nodes: where they are inside, and where on the host."""
    readable: tuple[Path, ...] = ()
    """Trees of the host to show: libraries and files of the driver."""
    variables: Mapping[str, str] | None = None
    """Environment variables that the code needs to find them."""
    programs: tuple[str, ...] = ()
    """Folders for the end of PATH."""


def find_gpus(partitions: Iterable[Partition] = ()) -> list[Gpu]:
    """Return the GPUs of this host; of one that is partitioned (MIG), its instances in its place."""
    whole = [*_nvidia_gpus(), *_amd_gpus()]
    split: dict[str, list[Gpu]] = {}
    for each in partitions:
        if (gpu := next((gpu for gpu in whole if gpu.uuid == each.parent), None)) is not None:
            split.setdefault(gpu.uuid, []).append(_instance(gpu, each))
    return [found for gpu in whole for found in split.get(gpu.uuid, [gpu])]


def choose_gpus(wanted: Sequence[str], found: Sequence[Gpu]) -> list[Gpu]:
    """Return those of the found GPUs that a setting names: "all" of them, or by index and uuid."""
    if [*wanted] == ["all"]:
        if not found:
            raise GpuUnavailable('gpus is "all", and this host has no GPU', hint=_driver_hint())
        return [*found]
    chosen: dict[str, Gpu] = {}
    for entry in wanted:
        matches = [gpu for gpu in found if entry in (gpu.uuid, str(gpu.index)) or entry == gpu.parent]
        if not matches:
            known = ", ".join(map(str, found)) or "none"
            raise GpuUnavailable(f"GPU {entry} does not exist; this host has {known}", hint=_driver_hint(found))
        chosen |= {gpu.uuid: gpu for gpu in matches}
    return [*chosen.values()]


def _driver_hint(found: Sequence[Gpu] = ()) -> str:
    if found:
        return "Name one of these in the setting gpus, by its index or uuid"
    return "The driver has to be loaded: `nvidia-smi -L` lists the GPUs that it sees"


def gpu_view(gpus: Sequence[Gpu], identity: Identity | None = None) -> GpuView:
    """Return what a sandbox shows for these GPUs; GpuUnavailable where something of it is missing.

    `identity` is the user that the session's code will be, where that is not the server's own.
    """
    if not gpus:
        return GpuView({})
    makers = {gpu.maker for gpu in gpus}
    nodes = [
        *(_SHARED if "nvidia" in makers else ()),
        *((_KFD,) if "amd" in makers else ()),
        *(node for gpu in gpus for node in gpu.nodes),
    ]
    for node in nodes:
        _check_node(node, identity)
    devices = {node: _at(node) for node in dict.fromkeys(nodes)}
    if "nvidia" not in makers:
        return GpuView(devices, tuple(_at(path) for path in _KFD_FILES if _at(path).exists()))
    folder = library_folder()
    check_versions(folder)
    variables = {**_FRUGAL, **({} if _loader_finds(folder) else {"LD_LIBRARY_PATH": str(folder)})}
    if instances := [gpu.uuid for gpu in gpus if gpu.parent]:
        # The node of the whole GPU is there too, and a program takes the first device that it finds.
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(instances)
    programs = next((place for place in _PROGRAMS if (_at(place) / _SMI).exists()), "")
    shown = [folder, *([Path(programs)] if programs else [])]
    readable = tuple(path for path in shown if not any(path.is_relative_to(tree) for tree in _SYSTEM))
    return GpuView(devices, readable, variables, (programs,) if programs not in ("", "/usr/bin") else ())


def loader_variables() -> dict[str, str]:
    """Return the variables by which a process that is forked into sessions later finds the driver's libraries.

    The loader reads them when a process starts, so a fork cannot be given them.
    """
    try:
        folder = library_folder()
    except GpuUnavailable:
        return {}
    return {} if _loader_finds(folder) else {"LD_LIBRARY_PATH": str(folder)}


def library_folder() -> Path:
    """Return the folder of the driver's libraries, as the host's loader finds them."""
    if cached := _cached_folder():
        return cached
    given = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path.startswith("/")]
    for place in (*given, *_FOLDERS):
        if (_at(place) / _LIBRARY).exists():
            return Path(place)
    raise GpuUnavailable(
        f"{_LIBRARY}, the library of NVIDIA's driver, is not on this host",
        hint="Install the driver's compute libraries (Debian: libcuda1; containers: start them with the GPU runtime)",
    )


def check_versions(folder: Path) -> None:
    """Refuse a library that is not the loaded driver's: NVIDIA's two parts work only at the same version."""
    driver = driver_version()
    found = _VERSION.search(_resolved(_at(str(folder)) / _LIBRARY).name.removeprefix("libcuda.so."))
    library = found.group(1) if found else ""
    if driver and library and driver != library:
        raise GpuUnavailable(
            f"the NVIDIA driver that is loaded is {driver}, its library in {folder} is {library}",
            hint="They must be the same: restart the machine after an update of the driver, or update the image",
        )


def driver_version() -> str:
    """Return the version of NVIDIA's driver that is loaded; empty if none is, or it does not say."""
    try:
        text = _at("/proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return ""
    found = _VERSION.search(text.partition("\n")[0])
    return found.group(1) if found else ""


# The GPUs of NVIDIA


def _nvidia_gpus() -> list[Gpu]:
    try:
        # In the order of their addresses on the bus, which is the order that nvidia-smi numbers them in.
        folders = sorted(_at(f"/{_INFORMATION}").iterdir())
    except OSError:
        return _bare_gpus()
    facts = [_facts(folder / "information") for folder in folders]
    usable = [each for each in facts if each.get("Device Minor", "").isdecimal() and each.get("GPU Excluded") != "Yes"]
    return [
        Gpu(each.get("GPU UUID", ""), index, each.get("Model", "NVIDIA"), (f"/dev/nvidia{each['Device Minor']}",))
        for index, each in enumerate(usable)
    ]


def _bare_gpus() -> list[Gpu]:
    """Return the GPUs by their nodes alone, where the driver shows nothing in /proc, as under gVisor."""
    numbers = sorted(int(path.name[6:]) for path in _at("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal())
    return [Gpu(f"GPU-{number}", index, "NVIDIA", (f"/dev/nvidia{number}",)) for index, number in enumerate(numbers)]


def _facts(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _instance(gpu: Gpu, partition: Partition) -> Gpu:
    """Return a MIG instance: it needs its GPU's node, and the nodes of two capabilities, its own and no others."""
    minor = gpu.nodes[0].removeprefix("/dev/nvidia")
    within = f"/{_CAPABILITIES}/gpu{minor}/mig/gi{partition.gpu_instance}"
    files = (f"{within}/access", f"{within}/ci{partition.compute_instance}/access")
    nodes = tuple(f"/dev/nvidia-caps/nvidia-cap{_capability(_at(file), partition)}" for file in files)
    return Gpu(partition.uuid, gpu.index, partition.name, (*gpu.nodes, *nodes), parent=gpu.uuid)


def _capability(file: Path, partition: Partition) -> str:
    try:
        found = _MINOR.search(file.read_text(errors="replace"))
    except OSError:
        found = None
    if found is None:
        raise GpuUnavailable(
            f"the driver does not say how {partition.uuid} is reached: {file} cannot be read",
            hint="Load the driver with nvidia-cap nodes (`nvidia-modprobe -c 0 -f FILE`), or name whole GPUs in gpus",
        )
    return found.group(1)


# The GPUs of AMD, by the same seam. Nobody has tried this with one.


def _amd_gpus() -> list[Gpu]:
    found: list[Gpu] = []
    if not _at(_KFD).exists():
        return found
    # A node of the topology without a render node is a processor.
    for node in sorted(_at("/sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: path.name.zfill(4)):
        try:
            text = (node / "properties").read_text(errors="replace")
            name = (node / "name").read_text(errors="replace").strip() or "AMD"
        except OSError:
            continue
        render, unique = _RENDER.search(text), _UNIQUE.search(text)
        if render is None or render.group(1) == "0":
            continue
        number = int(unique.group(1)) if unique else int(render.group(1))
        found.append(Gpu(f"AMD-{number:x}", len(found), name, (f"/dev/dri/renderD{render.group(1)}",), maker="amd"))
    return found


# Files


def _at(path: str) -> Path:
    """Return where a path of the host is found."""
    return ROOT / path.lstrip("/")


def _resolved(path: Path) -> Path:
    """Return what a link within its folder leads to. Links are not followed out of a tree that is made up."""
    for _ in range(8):
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    return path


def _cached_folder() -> Path | None:
    """Return where the loader's cache has the library; None if it is not in it, or has gone since."""
    try:
        cache = _at("/etc/ld.so.cache").read_bytes()
    except OSError:
        return None
    named = (os.fsdecode(each) for each in cache.split(b"\0") if each.startswith(b"/"))
    folders = [path.removesuffix(f"/{_LIBRARY}") for path in named if path.endswith(f"/{_LIBRARY}")]
    return next((Path(folder) for folder in folders if (_at(folder) / _LIBRARY).exists()), None)


def _loader_finds(folder: Path) -> bool:
    return str(folder) in _LOADERS_OWN or folder == _cached_folder()


def _check_node(node: str, identity: Identity | None) -> None:
    path = _at(node)
    try:
        mode = path.stat().st_mode
    except OSError:
        hint = "`nvidia-smi` makes it, where the driver works" if node.startswith("/dev/nvidia") else ""
        if node == "/dev/nvidia-uvm":
            hint = "Make it, as root: nvidia-modprobe -u -c 0"
        raise GpuUnavailable(f"device {node} is not there", hint=hint or "See that its driver is loaded") from None
    # A session with a user of its own is in no group of the host's.
    bits, access = (0o004, os.R_OK) if "nvidia-caps" in node else (0o006, os.R_OK | os.W_OK)
    if mode & bits != bits and (identity is not None or not os.access(path, access)):
        hint = f"Open it to others, as root: chmod o+rw {node}"
        raise GpuUnavailable(f"device {node} is closed to sessions", hint=hint)
