"""A model that transformers' tensor parallelism split over processes is swapped in each of them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import twell_lab as tl
from tests.models.swapping.spread import llama
from twell_lab.core import InputError
from twell_lab.layers.sparse_ffn import SparseFFN

pytest.importorskip("transformers.distributed.tensor_parallel")
pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def mesh():
    """One process, which holds all: what is split over it is split all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return llama()


@pytest.fixture
def tokens():
    return torch.arange(18).view(2, 9)


@pytest.fixture
def sums(monkeypatch):
    """The sums over the processes since."""
    made, real = [], dist.all_reduce

    def summed(y, **how):
        made.append(y)
        return real(y, **how)

    monkeypatch.setattr(dist, "all_reduce", summed)
    return made


def split(model, mesh, only=""):
    from tests.models.swapping.split import split

    return split(model, mesh, only)


def test_two_processes_give_what_they_gave_dense(model, tmp_path):
    """By every path, in no_grad and inference mode, compiled, generating, with gradients, after weights changed."""
    from tests.models.swapping.split import expected, split_report

    model.save_pretrained(tmp_path)
    loaded = [tmp_path] if importlib.util.find_spec("accelerate") else []  # without it no model is loaded with tp_plan
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    file = ROOT / "tests" / "models" / "swapping" / "split.py"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [*run, file, "cpu", *loaded],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert split_report(ran.stdout) == expected(loaded)


@torch.no_grad()
def test_processes_sum_as_often_as_before_whatever_a_layer_decides(model, mesh, tokens, sums):
    split(model, mesh)
    expected = model(tokens).logits
    once = len(sums)
    tl.sparsify(model)
    layers = [each for each in model.modules() if isinstance(each, SparseFFN)]
    for _ in range(12):
        torch.testing.assert_close(model(tokens).logits, expected)
    assert all(layer.status()["plan"] == "planned" for layer in layers)
    assert len(sums) == 13 * once


@torch.no_grad()
def test_a_plan_times_a_process_alone(model, mesh, tokens, sums):
    split(model, mesh)
    profile = tl.profile(model, tokens)
    sums.clear()
    plan = tl.plan(profile, model, tokens=(4,), batches=[tokens])
    planned = len(sums)
    expected = model(tokens).logits
    assert planned <= len(sums) - planned  # at most one forward, which shows the rows that are timed
    torch.testing.assert_close(tl.sparsify(model, plan)(tokens).logits, expected)


def test_memory_is_a_share_of_what_the_process_holds(model, mesh):
    whole = sum(p.nbytes for p in model.parameters())
    tl.sparsify(split(model, mesh), "twell")
    extra = sum(each.extra_bytes for each in model.modules() if isinstance(each, SparseFFN))
    assert f"{extra:,} bytes, {extra / whole:.2%} of the model's" in str(tl.report(model))


@pytest.mark.parametrize("only", ["gate_proj", "down_proj"])
def test_a_layer_of_which_some_is_split_is_refused(model, mesh, only):
    with pytest.raises(InputError, match=r"layers\.0\.mlp .*not each projection.*without tp_plan"):
        tl.sparsify(split(model, mesh, only))
    assert not any(isinstance(each, SparseFFN) for each in model.modules())


def test_what_is_split_after_the_swap_is_noticed(model, mesh, tokens):
    tl.sparsify(model, "twell")
    split(model, mesh, "_proj")
    with torch.no_grad(), pytest.raises(InputError, match="gate_proj of a SparseFFN is now split over processes"):
        model(tokens)


def test_what_is_no_longer_split_is_noticed(model, mesh, tokens):
    tl.sparsify(split(model, mesh), "twell")
    mlp = model.model.layers[0].mlp
    mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight.to_local().detach())
    with torch.no_grad(), pytest.raises(InputError, match="of a SparseFFN"):
        model(tokens)
