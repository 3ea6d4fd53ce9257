import importlib.metadata
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from twell_lab.core import machine
from twell_lab.core.errors import StackError

KEYS = {
    "os",
    "cpu",
    "cores",
    "python",
    "torch",
    "torch_cuda",
    "numpy",
    "cupy",
    "cupy_package",
    "nvrtc",
    "gpus",
    "cuda_driver",
}
SMI = "NVIDIA H100 80GB HBM3, 9.0, 81559, 580.82.07\nTesla P100-PCIE-16GB, 6.0, 16384, 580.82.07\n"


@pytest.fixture
def packages(monkeypatch):
    """Installed packages as this test wants them: name -> version, None where it is not installed."""
    real, wanted = importlib.metadata.version, {}

    def version(name):
        if name in wanted and wanted[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return wanted.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    wanted.update(dict.fromkeys(machine.CUPY_PACKAGES))
    return wanted


def test_describe_has_every_field_as_json_without_paths_or_the_host_name():
    described = machine.describe()
    assert set(described) == KEYS
    text = json.dumps(described, allow_nan=False)
    import platform

    host = platform.node()
    assert "/home" not in text and sys.prefix not in text and (len(host) < 4 or host not in text)
    assert described["python"] == platform.python_version()
    assert described["torch"] == importlib.metadata.version("torch")
    assert described["cores"] >= 1


def test_describe_survives_every_probe_failing(monkeypatch, packages):
    def broken(*arguments, **keywords):
        raise OSError("as on a broken machine")

    for name in ("_os", "_cpu", "_cores", "_nvrtc", "torch_cuda", "gpus", "cuda_driver"):
        monkeypatch.setattr(machine, name, broken)
    monkeypatch.setattr(importlib.metadata, "version", broken)
    described = machine.describe()
    assert set(described) == KEYS
    assert described["gpus"] == []
    assert all(described[key] is None for key in KEYS - {"gpus", "python"})


def test_gpus_are_listed_by_nvidia_smi_where_torch_sees_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: "nvidia-smi")
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=SMI))
    assert machine.gpus() == [
        {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "memory_gib": 79.6, "driver": "580.82.07"},
        {"name": "Tesla P100-PCIE-16GB", "capability": "6.0", "memory_gib": 16.0, "driver": "580.82.07"},
    ]
    assert machine.gpu() is None


def test_gpus_are_torchs_where_it_sees_some(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    properties = SimpleNamespace(name="NVIDIA GeForce RTX 4090", major=8, minor=9, total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.gpus() == [
        {"name": "NVIDIA GeForce RTX 4090", "capability": "8.9", "memory_gib": 24.0, "driver": None}
    ]
    assert machine.gpu() == "RTX 4090"


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 20),
        subprocess.CalledProcessError(9, "nvidia-smi", "NVIDIA-SMI has failed because it couldn't communicate"),
    ],
)
def test_a_failing_nvidia_smi_means_no_gpus(monkeypatch, failure):
    def run(*arguments, **keywords):
        raise failure

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: "nvidia-smi")
    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine.gpus() == []
    assert machine.describe()["gpus"] == []


def test_unreadable_lines_of_nvidia_smi_are_left_out(monkeypatch):
    answer = "No devices were found\nNVIDIA X, [N/A], 1, 2\nNVIDIA T4, 7.5, [N/A], 535.1\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: "nvidia-smi")
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=answer))
    assert machine.gpus() == [{"name": "NVIDIA T4", "capability": "7.5", "memory_gib": None, "driver": "535.1"}]


@pytest.mark.parametrize(
    "torch_cuda, package, mended",
    [
        ("13.0", "cupy-cuda12x", "cupy-cuda13x[ctk]"),
        ("12.8", "cupy-cuda13x", "cupy-cuda12x[ctk]"),
        ("12.8", "cupy-cuda11x", "cupy-cuda12x[ctk]"),
    ],
)
def test_mixed_cuda_majors_are_refused_with_both_versions_and_the_command(
    monkeypatch, packages, torch_cuda, package, mended
):
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    packages["torch"], packages[package] = "2.99.1", "14.2.0"
    with pytest.raises(StackError) as refused:
        machine.check_stack()
    message = str(refused.value)
    for part in ("torch 2.99.1", f"CUDA {torch_cuda}", f"{package} 14.2.0", f"pip uninstall -y {package}", mended):
        assert part in message


@pytest.mark.parametrize(
    "torch_cuda, package",
    [
        ("13.0", "cupy-cuda13x"),
        ("12.8", "cupy-cuda12x"),
        (None, "cupy-cuda12x"),
        ("13.0", None),
    ],
)
def test_matching_majors_a_cpu_torch_and_no_cupy_are_accepted(monkeypatch, packages, torch_cuda, package):
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    if package:
        packages[package] = "14.2.0"
    machine.check_stack()


def test_two_builds_of_cupy_are_refused(monkeypatch, packages):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    packages["cupy-cuda12x"] = packages["cupy-cuda13x"] = "14.2.0"
    with pytest.raises(StackError, match="installed together") as refused:
        machine.check_stack()
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupy-cuda12x[ctk]" in str(refused.value)


def test_a_source_build_of_cupy_is_asked_for_its_cuda(monkeypatch, packages):
    driver = SimpleNamespace(get_build_version=lambda: 13020)
    for name, module in {"cupy": SimpleNamespace(), "cupy.cuda": SimpleNamespace(driver=driver)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    packages["cupy"] = "14.2.0"
    with pytest.raises(StackError, match="cupy 14.2.0 for CUDA 13"):
        machine.check_stack()
