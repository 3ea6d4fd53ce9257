import sys

import pytest
import torch

from twell_lab import core
from twell_lab.app import doctor

H100 = {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "memory_gib": 79.1, "driver": "580.82.07"}
P100 = {"name": "Tesla P100-PCIE-16GB", "capability": "6.0", "memory_gib": 16.0, "driver": "535.1"}
FACTS = {
    **{"os": "Debian GNU/Linux 12, x86_64", "cpu": "a CPU", "cores": 2, "python": "3.12.1", "numpy": "2.1.3"},
    **{"torch": "2.10.0", "torch_cuda": "12.8", "cupy": "14.2.0", "cupy_package": "cupy-cuda12x", "nvrtc": "12.8"},
    **{"gpus": [H100], "cuda_driver": "13.0"},
}


@pytest.fixture
def on(monkeypatch):
    """Examine a machine described by FACTS with the given changes; returns findings by topic."""

    def examine(usable=True, fault=None, **changes):
        monkeypatch.setattr(core, "describe_machine", lambda: {**FACTS, **changes})
        monkeypatch.setattr(core, "gpu", lambda: "H100" if usable else None)
        monkeypatch.setattr(core, "stack_fault", lambda: fault)
        return doctor.examine()

    return examine


def test_this_machine_is_examined():
    findings = doctor.examine()
    for finding in findings.values():
        assert finding.state in ("ok", "missing", "limited") and "could not be examined" not in finding.text
    assert findings["PyTorch"].state == "ok" and torch.__version__ in findings["PyTorch"].text


def test_a_whole_gpu_machine_is_ok(on):
    found = on()
    assert {finding.state for topic, finding in found.items() if topic != "packages"} == {"ok"}
    assert "sm_90" in found["GPU"].text and "580.82.07" in found["GPU"].text


NO_GPU = {"usable": False, "gpus": [], "cuda_driver": None}
FAULT = ("torch 2.14.0 is built for CUDA 13.0 and cupy-cuda12x 14.2.0 for CUDA 12", "pip uninstall -y cupy-cuda12x")


@pytest.mark.parametrize(
    "changes, limited, topic, says, command",
    [
        (NO_GPU, {"GPU"}, "GPU", "", None),
        (NO_GPU | {"fault": FAULT}, {"GPU"}, "CuPy", "", None),
        ({"gpus": [P100]}, {"GPU"}, "GPU", "sm_75", None),
        (NO_GPU | {"torch": None, "torch_cuda": None}, {"PyTorch", "GPU"}, "GPU", "", None),
        ({"usable": False, "torch_cuda": None}, {"GPU"}, "GPU", "without CUDA", "cu12"),
        (
            {"usable": False, "torch_cuda": "13.0", "cuda_driver": "12.4"},
            {"GPU"},
            "GPU",
            "runs CUDA up to 12.4",
            "cu12",
        ),
        ({"usable": False}, {"GPU"}, "GPU", "CUDA_VISIBLE_DEVICES", None),
        ({"fault": FAULT}, {"CuPy"}, "CuPy", FAULT[0], FAULT[1]),
    ],
)
def test_what_is_missing_limits_what_needs_it_and_nothing_else(on, changes, limited, topic, says, command):
    found = on(**changes)
    assert {name for name, finding in found.items() if finding.state != "ok"} - {"packages", "simulator"} == limited
    assert says in found[topic].text and (command or "") in (found[topic].command or "")
    assert (found[topic].command is None) == (command is None)


@pytest.mark.parametrize(
    "changes, extra",
    [
        ({"torch_cuda": "12.8"}, "cu12"),
        ({"torch_cuda": "13.0"}, "cu13"),
        pytest.param({"gpus": []}, "compile", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux wheels")),
    ],
)
def test_missing_cupy_and_nvrtc_name_the_extra_that_fits(on, monkeypatch, changes, extra):
    monkeypatch.setattr(sys, "prefix", "elsewhere")
    for gone in ({"nvrtc": None}, {"nvrtc": None, "cupy": None, "cupy_package": None}):
        found = on(**gone, **changes)
        assert found["CuPy"].state == "missing"
        command = found["CuPy"].command
        assert "pip install" in command and "twell-lab" not in command
        assert "cupy-cuda" in command and ("[ctk]" in command) == (extra != "compile") or f".[{extra}]" in command


def test_cubins_compiled_elsewhere_need_no_compiler(on, monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path))
    assert on(nvrtc=None)["CuPy"].state == "ok"


def test_packages_that_are_used_where_they_are_there_are_named_with_what_installs_them(on, monkeypatch):
    monkeypatch.setattr(core, "version", lambda package: None if package == "nvidia-ml-py" else "1.2")
    found = on()["packages"]
    assert found.state == "missing" and found.command == "pip install nvidia-ml-py"
    assert all(f"{name} 1.2" in found.text for name in ("plotly", "transformers", "tokenizers", "datasets"))
    assert on(usable=False, gpus=[])["packages"].state == "ok"  # there is no energy to read


def test_a_probe_that_breaks_spoils_no_other_finding(on, monkeypatch):
    def broken(*arguments):
        raise ValueError("unheard of")

    monkeypatch.setattr(core, "version", broken)
    found = on()
    assert found["packages"].state == "limited" and "ValueError: unheard of" in found["packages"].text
    assert found["GPU"].state == found["CuPy"].state == "ok"
    monkeypatch.setattr(core, "describe_machine", broken)
    assert all(finding.state == "limited" and "unheard of" in finding.text for finding in doctor.examine().values())


def test_a_compiler_that_loads_is_named():
    nvrtc = pytest.importorskip("cupy.cuda", exc_type=ImportError).nvrtc
    assert core.describe_machine()["nvrtc"] == ".".join(map(str, nvrtc.getVersion()))
