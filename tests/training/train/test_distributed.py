"""Several processes: two of them, started by torchrun, train what one trains, replicated and sharded. What torchrun
does when it is told to end itself is in tests/nightly/test_processes.py."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.train.small_runs import ENVIRONMENT, options
from twell_lab.core import DeviceError, InputError
from twell_lab.models.tiny import LanguageModel
from twell_lab.training import checkpoint, parallel
from twell_lab.training.loop import train

SEVERAL = Path(__file__).with_name("several.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# Sums over halves of a batch are rounded elsewhere than sums over all of it. Over these twelve steps, at a learning
# rate high enough for neurons to die, losses were seen to agree to 1e-6 and a nearly silent layer's L1 to 2.4e-5.
CLOSE = dict(rel=1e-4, abs=1e-6)
EVERYTHING = dict(dead_window=60, reinit=0.1, dead_every=3, accumulate=2, l1=1.0, lr=0.08, warmup=2)

RUNS = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "ddp-sparse": {"parallel": "ddp", "kernels": "sparse"},
    "fsdp-sparse": {"parallel": "fsdp", "kernels": "sparse"},
}
STOPPED = {f"{name}-stopped": RUNS[name] for name in ("fsdp", "ddp-sparse")}  # one process gets a Ctrl-C


@pytest.fixture(scope="module")
def runs(tiny, some_text, tmp_path_factory):
    """{name of RUNS: folder} of two processes each, the config that all share, and what they printed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.py").write_bytes(some_text.tokens.numpy().tobytes())
    config = tiny(text=folder / "text.py", **EVERYTHING)
    shared = [*options(config), f"--text={config.text}"]
    (folder / "file").write_text("in the way")  # only the first process finds out, and none is to wait for it
    asked = [([*shared, f"--out={folder / 'file'}"], 2)]
    asked += [
        ([*shared, *(f"--{key}={value}" for key, value in how.items()), f"--out={folder / name}"], status)
        for several, status in ((RUNS, 0), (STOPPED, 130))
        for name, how in several.items()
    ]
    command = [*TORCHRUN, SEVERAL, "cpu", json.dumps(asked)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert ran.returncode == 0, ran.stderr
    return {name: folder / name for name in (*RUNS, *STOPPED)}, config, ran.stdout, ran.stderr


@pytest.fixture(scope="module")
def alone(runs):
    return train(runs[1], progress=False)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_the_curve_of_one(runs, alone, name):
    rows = [json.loads(line) for line in (runs[0][name] / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row in alone.history]
    for two, one in zip(rows, alone.history, strict=True):
        for field in ("loss", "ce", "l1_term", "l1_layers", "lr"):
            assert two[field] == pytest.approx(one[field], **CLOSE), (field, two["step"])
        assert two["nnz_layers"] == pytest.approx(one["nnz_layers"], rel=1e-3)
        assert two["dead_layers"] == one["dead_layers"]
    assert any(sum(row["dead_layers"]) for row in rows)  # or nothing was re-initialised
    assert rows[-1]["val_bits_per_byte"] == pytest.approx(alone.validation_bits_per_byte, **CLOSE)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_their_model_and_checkpoint_are_whole(runs, alone, parallel):
    folder = runs[0][parallel]
    saved, state = LanguageModel.load(folder), checkpoint.load(folder)
    for (name, weight), other in zip(saved.named_parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-3, atol=1e-4)
        assert torch.equal(state["weights"][name], weight)
        assert state["optimizer"][name]["exp_avg"].shape == weight.shape


@pytest.mark.parametrize("name", STOPPED)
def test_one_process_goes_on_where_two_stopped(runs, alone, name):
    """Saved by two in the middle of a run, resumed by one: its last steps are those of the run that one made."""
    state = checkpoint.load(runs[0][name])
    assert state["step"] == 8
    result = train(
        dataclasses.replace(runs[1], kernels=STOPPED[name].get("kernels", "off")), resume=runs[0][name], progress=False
    )
    assert result.history[: len(state["history"])] == state["history"]
    for one, unbroken in zip(result.history, alone.history, strict=True):
        for field in ("step", "loss", "ce", "lr"):
            assert one[field] == pytest.approx(unbroken[field], **CLOSE), (field, one["step"])
    for weight, other in zip(result.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-3, atol=1e-4)


def test_only_the_first_process_prints(runs):
    assert runs[2].count("bits per byte") == len(RUNS)
    assert runs[3].count("twell-lab: stopped after step 8 of 12") == len(STOPPED)


def test_what_the_first_process_cannot_write_ends_them_all(runs):
    """The same error is raised in each process, so that none is left waiting; then they train the other runs."""
    for process in ("twell-lab: ", "twell-lab, process 1: "):
        assert f"{process}{str(runs[0]['ddp'].with_name('file'))!r} cannot be written" in runs[3]
    assert "Traceback" not in runs[3]


@pytest.mark.parametrize(
    "processes, device, error, words",
    [
        (4, None, DeviceError, "4 processes were started on a machine with 2 GPUs; accepted: .*2 or fewer"),
        (4, "cuda", DeviceError, "4 processes"),
        (2, "cuda:1", InputError, "device is 'cuda:1' for 2 processes"),
    ],
)
def test_processes_and_gpus_that_do_not_go_together_are_refused(tiny, monkeypatch, processes, device, error, words):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(processes))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(error, match=words):
        train(tiny(device=device), progress=False)


def test_a_batch_that_cannot_be_shared_is_refused(tiny, monkeypatch):
    world = parallel.World(torch.device("cpu"), rank=0, size=3)
    monkeypatch.setattr(parallel, "joined", lambda device: __import__("contextlib").nullcontext(world))
    with pytest.raises(InputError, match="batch is 4 with accumulate 1 and 3 processes; accepted: a multiple of 3"):
        train(tiny(), progress=False)
