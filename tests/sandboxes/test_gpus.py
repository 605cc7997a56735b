"""Which GPUs a host has and what code needs to use one, over trees that are made up."""

from pathlib import Path

import pytest

from belljar.errors import GpuUnavailable
from belljar.sandboxes.base import Identity
from belljar.sandboxes.gpus import Partition, choose_gpus, find_gpus, gpu_view, loader_variables
from made_up_gpus import DRIVER, make_host, stand_on, uuid_of, write

FRUGAL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make_host(tmp_path / "host")
    stand_on(root, monkeypatch)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return root


def refusal(*chosen: str, identity: Identity | None = None) -> str:
    with pytest.raises(GpuUnavailable) as caught:
        gpu_view(choose_gpus(chosen or ["all"], find_gpus()), identity)
    return str(caught.value)


def test_gpus_are_found_in_the_order_of_the_bus_and_chosen_by_index_and_uuid(host: Path) -> None:
    found = find_gpus()
    assert [str(gpu) for gpu in found] == [
        f"GPU 0 (NVIDIA H200, {uuid_of(0)})",
        f"GPU 1 (NVIDIA H200, {uuid_of(1)})",
    ]
    assert choose_gpus(["all"], found) == found
    assert choose_gpus(["1"], found) == choose_gpus([uuid_of(1), "1"], found) == found[1:]


def test_a_view_has_the_chosen_nodes_and_what_all_gpus_share_and_nothing_else(host: Path) -> None:
    view = gpu_view(choose_gpus(["1"], find_gpus()))
    assert view.devices == {node: host / node[1:] for node in ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1")}
    assert (view.readable, view.variables, view.programs) == ((), FRUGAL, ())
    assert gpu_view([]).devices == {}


def test_libraries_outside_the_systems_folders_are_shown_and_the_loader_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_host(tmp_path / "other", folder="run/opengl-driver/lib")
    stand_on(root, monkeypatch)
    (root / "etc/ld.so.cache").unlink()
    view = gpu_view(find_gpus())
    assert view.readable == (Path("/run/opengl-driver/lib"),)
    assert loader_variables() == {"LD_LIBRARY_PATH": "/run/opengl-driver/lib"}
    assert view.variables == {**FRUGAL, **loader_variables()}
    (root / "usr/bin/nvidia-smi").unlink()
    write(root / "usr/local/nvidia/bin/nvidia-smi", "", 0o755)
    assert gpu_view(find_gpus()).programs == ("/usr/local/nvidia/bin",)


def test_a_gpu_that_does_not_exist_is_refused_with_those_that_do(host: Path) -> None:
    assert refusal("7").startswith(f"GPU 7 does not exist; this host has GPU 0 (NVIDIA H200, {uuid_of(0)}), GPU 1")
    assert refusal("GPU-0").startswith("GPU GPU-0 does not exist")


def test_a_host_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(tmp_path, monkeypatch)
    assert find_gpus() == []
    assert 'gpus is "all", and this host has no GPU' in refusal()
    assert "this host has none" in refusal("0")


def test_a_library_that_is_not_the_drivers_is_refused_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_on(make_host(tmp_path / "updated", library="590.48.01"), monkeypatch)
    assert f"driver that is loaded is {DRIVER}, its library in /usr/lib/x86_64-linux-gnu is 590.48.01" in refusal()


def test_a_missing_library_or_node_is_named_with_what_to_do(host: Path) -> None:
    (host / "dev/nvidia-uvm").unlink()
    assert "device /dev/nvidia-uvm is not there. Make it, as root: nvidia-modprobe -u -c 0" in refusal()
    write(host / "dev/nvidia-uvm", "", 0o666)
    (host / "dev/nvidia1").unlink()
    assert "device /dev/nvidia1 is not there" in refusal("1")
    gpu_view(choose_gpus(["0"], find_gpus()))
    (host / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink()
    assert "libcuda.so.1, the library of NVIDIA's driver, is not on this host" in refusal("0")


def test_a_node_that_others_may_not_open_is_refused_for_a_session_with_a_user_of_its_own(host: Path) -> None:
    (host / "dev/nvidia0").chmod(0o660)
    assert "device /dev/nvidia0 is closed to sessions" in refusal("0", identity=Identity(1234, 1234))


def test_of_a_partitioned_gpu_the_instances_take_its_place_with_the_nodes_of_their_own(host: Path) -> None:
    within = host / "proc/driver/nvidia/capabilities/gpu0/mig/gi3"
    write(within / "access", "DeviceFileMinor: 30\nDeviceFileMode: 292\n")
    write(within / "ci0/access", "DeviceFileMinor: 31\nDeviceFileMode: 292\n")
    for number in (30, 31):
        write(host / f"dev/nvidia-caps/nvidia-cap{number}", "", 0o444)
    found = find_gpus([Partition("MIG-aaaa", uuid_of(0), "NVIDIA H200 MIG 1g.18gb", 3, 0)])
    assert [gpu.uuid for gpu in found] == ["MIG-aaaa", uuid_of(1)]
    view = gpu_view(choose_gpus(["MIG-aaaa"], found), Identity(1234, 1234))
    own = ("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31")
    assert [*view.devices] == ["/dev/nvidiactl", "/dev/nvidia-uvm", *own]
    assert view.variables == {**FRUGAL, "CUDA_VISIBLE_DEVICES": "MIG-aaaa"}
    with pytest.raises(GpuUnavailable, match="does not say how MIG-bbbb is reached"):
        find_gpus([Partition("MIG-bbbb", uuid_of(0), "", 4, 0)])


def test_gpus_of_amd_have_their_render_node_and_the_driver_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_on(tmp_path, monkeypatch)
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, render in (("0", 0), ("1", 128)):  # the first is the processor
        write(nodes / number / "properties", f"cpu_cores_count 8\ndrm_render_minor {render}\nunique_id 255\n")
        write(nodes / number / "name", "gfx942\n")
    for node in ("kfd", "dri/renderD128"):
        write(tmp_path / "dev" / node, "", 0o666)
    (gpu,) = find_gpus()
    assert (gpu.uuid, gpu.name, gpu.maker) == ("AMD-ff", "gfx942", "amd")
    view = gpu_view([gpu])
    assert [*view.devices] == ["/dev/kfd", "/dev/dri/renderD128"]
    assert view.readable == (tmp_path / "sys/class/kfd",)
