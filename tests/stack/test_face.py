"""The face of the package: the lazy table and the stub say the same, every name is there, nothing else is touched."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import twell_lab as tl

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "twell_lab"
FACE = [name for name in tl.__all__ if name != "__version__"]


def promised(stub: str) -> dict[str, str]:
    """Name -> where a stub says that it comes from: "analysis.plan.Plan"; "bench" is a folder itself."""
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
import gc, json, sys
import torch
from torch.nn.modules import module
from torch.optim import optimizer

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

before = hooks(), functions()
import twell_lab
for name in twell_lab.__all__:
    getattr(twell_lab, name)
after = hooks(), functions()
changed = [name for name, value in before[1].items() if after[1].get(name) != value]
print(json.dumps({"hooks": [before[0], after[0]], "changed": changed}))
"""


def test_the_whole_face_leaves_torch_as_it_was():
    """No hook on every module, optimizer or tensor, and no function of torch's replaced."""
    said = json.loads(program(WATCH).splitlines()[-1])
    before, after = said["hooks"]
    assert any("optimizer" in name for name in before) and any("_global_forward_hooks" in name for name in before)
    assert before == after and said["changed"] == []


USER = """
import torch
import twell_lab as tl
from twell_lab.training.config import TrainResult

packed = tl.pack(torch.randn(4, 512), tile=256, words=32)
dense: torch.Tensor = packed.to_dense()
result: TrainResult = tl.train(tl.TrainConfig(l1=1e-3, steps=100))
firing: tl.FiringProfile = tl.profile(result.model, [torch.zeros(1, 8, dtype=torch.int64)])
plan: tl.Plan = tl.plan(firing, result.model, tokens=(1, 512))
model: torch.nn.Module = tl.sparsify(result.model, plan)
try:
    tl.densify(model)
except tl.InputError as error:
    print(error.args)
reveal_type(tl.train)
"""
WRONG = USER + 'tl.train("no config")\ntl.sparsified(model)\npacked.to_densee()\n'


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy comes with the test extra")
def test_a_users_program_is_checked_against_our_types(tmp_path):
    """As a type checker sees it: right calls pass, and a wrong argument, name and method are found."""
    from mypy import api

    (tmp_path / "right.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    shared = [
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--config-file=",
        f"--cache-dir={tmp_path / 'kept'}",
    ]
    said, trouble, _ = api.run([*shared, str(tmp_path / "right.py"), str(tmp_path / "wrong.py")])
    assert not trouble
    right = [line for line in said.splitlines() if "right.py" in line]
    wrong = [line for line in said.splitlines() if "wrong.py" in line and "error" in line]
    assert len(right) == 1 and "TrainResult" in right[0], said  # what reveal_type said
    assert ["[arg-type]" in wrong[0], "sparsified" in wrong[1], "to_densee" in wrong[2]] == [True] * 3, said
    assert len(wrong) == 3
