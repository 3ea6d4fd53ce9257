"""The face of the package: the lazy table and the stub say the same, every name is there, nothing else is touched."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import twell_lab as tl

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "twell_lab"
FACE = [name for name in tl.__all__ if name != "__version__"]


def promised(stub: str) -> dict[str, str]:
    """Name -> where a stub says that it comes from: "analysis.planner.Plan"; "bench" is a folder itself."""
    found = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert node.level == 1 and alias.asname == alias.name  # or a type checker takes it for private
                found[alias.name] = f"{node.module}.{alias.name}" if node.module else alias.name
    return found


def program(text: str, *arguments: str) -> str:
    """What a fresh Python prints that runs this text."""
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_stub_and_the_face_name_the_same_things():
    stub = promised((PACKAGE / "__init__.pyi").read_text())
    assert sorted(stub) == sorted(FACE)
    for name, place in stub.items():
        module, _, attribute = place.rpartition(".")
        told = getattr(importlib.import_module(f"twell_lab.{module}"), attribute) if module else None
        assert getattr(tl, name) is (told or importlib.import_module(f"twell_lab.{name}")), name


@pytest.mark.parametrize("name", FACE)
def test_every_name_resolves_and_says_what_it_is(name):
    found = getattr(tl, name)
    assert name in dir(tl) and inspect.getdoc(found)


def test_a_module_of_the_package_is_imported_as_any_other():
    said = program(
        "import twell_lab as tl, twell_lab.training.loop, twell_lab.analysis.profile as firing\n"
        "before = tl.train, tl.profile\n"
        "import twell_lab.analysis.planner\n"
        "assert tl.train is twell_lab.training.loop.train and tl.profile is firing.profile\n"
        "assert before == (tl.train, tl.profile) and callable(tl.plan) and callable(tl.train)\n"
        "print(type(twell_lab.training.loop).__name__, type(tl).__name__)"
    )
    assert said.split() == ["module", "module"]


WATCH = """
import gc, importlib, json, sys
import torch
from torch.nn.modules import module
from torch.optim import optimizer

def mapped():
    try:
        return {line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line}
    except OSError:
        return set()

def own():
    return sum(name.partition(".")[0] == "twell_lab" for name in sys.modules)

def hooks():
    found = {}
    for place in (module, optimizer, torch.optim.Optimizer, torch.nn.Module, torch.Tensor, torch.utils.data):
        for name, value in vars(place).items():
            if "hook" in name and hasattr(value, "__len__"):
                found[f"{place.__name__}.{name}"] = len(value)
    return found

def functions():
    return {f"{place.__name__}.{name}": id(value) for place in (torch, torch.Tensor, torch.nn.Module, torch.nn.functional,
            torch.optim.Optimizer, torch.cuda) for name, value in list(vars(place).items()) if callable(value)}

driver, before = mapped(), (hooks(), functions())
import twell_lab
files = [own()]
importlib.import_module("twell_lab.layers.sparse_ffn")
files.append(own())
for name in twell_lab.__all__:
    getattr(twell_lab, name)
after = hooks(), functions()
heavy = "cupy plotly ipywidgets anywidget IPython jupyter jupyterlab transformers pandas".split()
print(json.dumps({
    "hooks": [before[0], after[0]],
    "changed": [name for name, value in before[1].items() if after[1].get(name) != value],
    "files": files,
    "heavy": sorted({name.split(".")[0] for name in sys.modules} & set(heavy)),
    "cuda": torch.cuda.is_initialized() or bool(mapped() - driver),
}))
"""


def test_the_whole_face_leaves_torch_as_it_was_and_loads_little():
    """No hook on every module, optimizer or tensor, no function of torch's replaced, no GPU touched and nothing that
    draws imported; a sparse layer takes few files, as an operation is imported when it is first used."""
    said = json.loads(program(WATCH).splitlines()[-1])
    before, after = said["hooks"]
    assert any("optimizer" in name for name in before) and any("_global_forward_hooks" in name for name in before)
    assert before == after and said["changed"] == []
    package, layer = said["files"]
    assert package <= 3 and layer <= 25 and said["heavy"] == [] and not said["cuda"]
