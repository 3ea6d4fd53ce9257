"""Two GPUs train what one trains: replicated and sharded over NCCL, through torch's layers and through the kernels."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.swapping.spread import MODELS, loud, off, places, spread
from tests.training.train import small_runs
from tests.training.train.interrupting import assert_saves_once
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel
from twell_lab.ops.train import PATHS, train_ffn
from twell_lab.training import checkpoint
from twell_lab.training.loop import train
from twell_lab.training.text.source import standard_library

from .drawn import tensors
from .test_trainer import BFLOAT16, FLOAT32, SMALL, close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
ROOT = Path(__file__).resolve().parents[2]
SEVERAL = ROOT / "tests" / "training" / "train" / "several.py"
SPARSE = dict(dtype="bfloat16", kernels="sparse")
EVERYTHING = dict(accumulate=2, dead_window=4096, dead_every=6, reinit=0.1)  # and a step in parts, beside DDP and FSDP2
AUTO = dict(dtype="bfloat16", kernels="auto", d_model=512, d_ff=2048, l1=0.1, lr=5e-3, steps=60)
WAYS = {
    "": {},
    "-everything": EVERYTHING,
    "-bfloat16-compiled": dict(dtype="bfloat16", compile=True),
    "-sparse": SPARSE,
    "-sparse-compiled": dict(**SPARSE, compile=True),
    "-sparse-everything": dict(**SPARSE, **EVERYTHING),
    "-auto": AUTO,
    "-auto-compiled": dict(**AUTO, compile=True),
}
RUNS = {f"{of}{name}": dict(parallel=of, **changes) for of in ("ddp", "fsdp") for name, changes in WAYS.items()}
STOPPED = {f"{name}-stopped": RUNS[name] for name in ("fsdp-everything", "fsdp-sparse", "ddp-sparse")}  # at row four
DIVERGES = dict(lr=1e30, warmup=1)


def torchrun(*arguments, processes=2, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return subprocess.Popen([*command, *arguments], **pipes, **options)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes(standard_library().tokens[:1_000_000].numpy().tobytes())
    return dataclasses.replace(SMALL, text=path)


def options(config):
    return [*small_runs.options(config), f"--text={config.text}"]


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    """The folder of each run by its name, and what the processes printed."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {
        **{name: (changes, 0) for name, changes in RUNS.items()},
        **{name: (changes, 130) for name, changes in STOPPED.items()},
        **{f"{parallel}-diverges": ({"parallel": parallel, **DIVERGES}, 2) for parallel in ("ddp", "fsdp")},
    }
    asked = [
        ([*options(dataclasses.replace(base, **changes)), f"--out={folder / name}"], status)
        for name, (changes, status) in ways.items()
    ]
    with torchrun(SEVERAL, "cuda", json.dumps(asked)) as ran:
        said = ran.communicate(timeout=500)
    assert ran.returncode == 0, said[1]
    return folder, said


@pytest.fixture(scope="module")
def alone(base):
    """What one GPU trains with the same changes, each made once."""
    return functools.cache(lambda **changes: train(dataclasses.replace(base, **changes), progress=False))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name in RUNS if "auto" not in name])
def test_two_gpus_give_the_curve_of_one(runs, alone, name):
    changes = {key: value for key, value in RUNS[name].items() if key in EVERYTHING}
    plain, found = alone(**changes), rows(runs[0] / name)
    rel = BFLOAT16 if "dtype" in RUNS[name] else FLOAT32
    close(found, plain.history, rel)
    assert found[-1]["val_bits_per_byte"] == pytest.approx(plain.validation_bits_per_byte, rel=rel)
    if changes and rel == FLOAT32:
        assert sum(found[-1]["dead_layers"]) == pytest.approx(sum(plain.history[-1]["dead_layers"]), abs=4)


@pytest.mark.parametrize("name", [name for name in RUNS if "sparse" in name or "auto" in name])
def test_both_run_the_kernels(runs, name):
    kernels = [json.loads((runs[0] / name / f"kernels-{rank}.json").read_text()) for rank in (0, 1)]
    for beginning in ("survivor", "weighted_rows", "hidden_gradient", "input_gradient", "weight_gradients"):
        assert all(any(kernel.startswith(beginning) for kernel in each) for each in kernels), (beginning, kernels)


@pytest.mark.parametrize("name", [name for name in RUNS if "auto" in name])
def test_layers_that_go_over_to_the_kernels_have_the_loss_of_a_run_that_stays_dense(runs, alone, name):
    found = rows(runs[0] / name)
    plain = alone(**{key: value for key, value in AUTO.items() if key != "kernels"})
    assert found[-1]["ce"] == pytest.approx(
        plain.history[-1]["ce"], rel=5 * BFLOAT16
    )  # 60 steps at a high rate, not 24


@pytest.mark.parametrize("name", STOPPED)
def test_one_gpu_goes_on_where_two_stopped(runs, alone, base, name):
    """Saved by two in the middle of a run, resumed by one: its last steps are those of the run that one made."""
    state, changes = checkpoint.load(runs[0] / name), STOPPED[name]
    assert 1 < state["step"] < base.steps
    result = train(dataclasses.replace(base, **changes), resume=runs[0] / name, progress=False)
    assert result.history[: len(state["history"])] == state["history"]
    unbroken = alone(**{key: value for key, value in changes.items() if key in EVERYTHING})
    close(result.history, unbroken.history, BFLOAT16 if "dtype" in changes else FLOAT32)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_their_model_is_what_the_checkpoint_holds(runs, parallel):
    folder = runs[0] / parallel
    weights = checkpoint.load(folder)["weights"]
    assert all(torch.equal(weights[name], weight) for name, weight in LanguageModel.load(folder).named_parameters())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_that_diverges_ends_on_both_and_saves_nothing_of_it(runs, parallel):
    assert "training diverged" in runs[1][1] and not (runs[0] / f"{parallel}-diverges" / checkpoint.STATE).exists()


def test_interrupted_processes_agree_where_to_stop_and_save(base, tmp_path):
    out = tmp_path / "out"
    config = dataclasses.replace(base, steps=100_000, parallel="fsdp", **SPARSE)
    with torchrun("-m", "twell_lab", "train", *options(config), f"--out={out}", start_new_session=True) as stopped:
        assert_saves_once(stopped, out, 100_000)


def test_more_processes_than_gpus_are_refused(base):
    gpus = torch.cuda.device_count()
    with torchrun("-m", "twell_lab", "train", *options(base), processes=gpus + 1) as ran:
        said = ran.communicate(timeout=120)[1]
    assert ran.returncode and "nproc-per-node" in said
    assert f"{gpus + 1} processes were started on a machine with {gpus} GPUs" in said


@pytest.mark.parametrize("path", PATHS)
def test_a_layer_on_the_second_gpu_from_the_first(path):
    """Forwards and backwards, the same bits as on the first; weights' gradients are summed in a fixed order too."""
    made = tensors(300, 256, 1000)
    dy, results = torch.randn(made[0].shape, device="cuda").to(made[0].dtype), []
    for device in ("cuda:0", "cuda:1"):
        leaves = [None if t is None else t.to(device).requires_grad_() for t in made]
        y, l1, _ = train_ffn(*leaves, path=path)
        gradients = torch.autograd.grad(
            [y, l1], [t for t in leaves if t is not None], [dy.to(device), torch.ones_like(l1)]
        )
        assert all(t.device == torch.device(device) for t in (y, l1, *gradients))
        results.append([t.cpu() for t in (y, l1, *gradients)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("plan", ["twell", None])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_a_device_map_put_on_two_gpus_is_swapped(name, plan, tmp_path):
    """Loaded with it, swapped, and no further from the same model in float32 than with dense layers, but for a tenth."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    whole = loud(MODELS[name]())
    whole.save_pretrained(tmp_path)
    how = dict(device_map=places(whole, 0, 1), dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how).eval()
    tokens = torch.randint(64, (4, 48), device="cuda:0")
    with torch.no_grad():
        exact, dense = whole(tokens.cpu()).logits, model(tokens).logits
        said = model.generate(tokens, max_new_tokens=8, do_sample=False)
        sparsify(model, plan)
        for _ in range(12):  # enough for layers that decide by themselves
            found = model(tokens).logits
        assert {p.device.index for p in model.parameters()} == {0, 1} and found.device == dense.device
        assert 0 < off(dense, exact) < 0.1 and off(found, exact) <= 1.1 * off(dense, exact)
        assert model.generate(tokens, max_new_tokens=8, do_sample=False).shape == said.shape
        model.save_pretrained(saved := tmp_path / "swapped")
        again = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).state_dict()
        assert all(torch.equal(again[key], value.cpu()) for key, value in densify(model).state_dict().items())
        assert torch.equal(model(tokens).logits, dense)


@pytest.mark.parametrize("name", MODELS)
def test_on_two_gpus_in_float32_the_same_tokens_are_generated(name):
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = spread(loud(MODELS[name]()), 0, 1)
    tokens = torch.randint(64, (2, 16), device="cuda:0")
    with torch.no_grad():
        expected, said = model(tokens).logits, model.generate(tokens, max_new_tokens=16, do_sample=False)
        sparsify(model, "twell")
        torch.testing.assert_close(model(tokens).logits, expected)
        assert torch.equal(model.generate(tokens, max_new_tokens=16, do_sample=False), said)
