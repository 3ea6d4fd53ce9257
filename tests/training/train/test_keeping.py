"""What a run keeps when something goes wrong around it: a disk that fills, a process killed while it saves, a diverging
loss."""

import dataclasses
import errno
import io
import json
import math
from pathlib import Path

import pytest
import torch

from tests.training.train.small_runs import SMALL, broken_off
from twell_lab.analysis import switching
from twell_lab.app import cli
from twell_lab.core import DeviceError, InputError
from twell_lab.training import checkpoint, loop, objective, parallel
from twell_lab.training import run as running
from twell_lab.training.config import TrainResult
from twell_lab.training.loop import initial_model, train
from twell_lab.training.objective import bits_per_byte, cross_entropy
from twell_lab.training.text import load
from twell_lab.training.text.source import spread_windows


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def state(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    train(tiny(steps=2), out=folder, progress=False)
    return checkpoint.load(folder)


# Weights that are no numbers


@pytest.mark.parametrize("kernels", ["off", "sparse", "auto"])
def test_weights_that_are_not_finite_end_a_run_whatever_its_loss(kernels, tiny, tmp_path, monkeypatch):
    step = loop._step

    def spoil(run, number, count):
        numbers = step(run, number, count)
        if number == 4:
            with torch.no_grad():
                run.layers[0].up.weight[3] = math.nan
        return numbers

    monkeypatch.setattr(loop, "_step", spoil)
    with pytest.raises(InputError, match=r"not finite in layers\.0\.mlp\.up_proj\.weight at step 4"):
        train(tiny(steps=6, log_every=2, checkpoint_every=2, kernels=kernels), out=tmp_path, progress=False)
    assert checkpoint.load(tmp_path).step == 2


# Saving


def test_a_full_disk_keeps_the_checkpoint_before_and_no_half_of_the_new_one(state, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, state)

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.safetensors.torch, "save_file", full)
    with pytest.raises(InputError, match="cannot save a checkpoint in .*No space left"):
        checkpoint.save(tmp_path, dataclasses.replace(state, step=5))
    assert names(tmp_path) == ["checkpoint-000002"] and checkpoint.load(tmp_path).step == 2


def test_metrics_on_a_full_disk_end_with_a_whole_row_and_training_goes_on(tmp_path):
    class Full(io.FileIO):
        def write(self, data):
            return super().write(data[:7])

    metrics = loop._Metrics()
    metrics.open(tmp_path / "metrics.jsonl", [{"step": 1}])
    metrics.file.close()
    metrics.file = Full(tmp_path / "metrics.jsonl", "ab")
    with pytest.warns(UserWarning, match="step 2: .*takes no more rows: .*training goes on"):
        metrics.write({"step": 2})
    metrics.write({"step": 3})  # nothing more is tried, or said
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_resumption_where_nothing_can_be_written_is_refused_at_once(tiny, tmp_path, monkeypatch):
    broken_off(tiny(checkpoint_every=2), tmp_path, 4)
    checkpoints = [path.name for path in checkpoint.checkpoints(tmp_path)]
    (tmp_path / "metrics.jsonl").rename(tmp_path / "kept")
    (tmp_path / "metrics.jsonl").mkdir()  # root may write anywhere: a name that is taken stands for a read-only folder
    with pytest.raises(InputError, match="cannot write .*metrics.jsonl"):
        train(tiny(), resume=tmp_path, progress=False)
    (tmp_path / "metrics.jsonl").rmdir()
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(full))
    with pytest.raises(InputError, match="cannot save in .*No space left on device"):
        train(tiny(), resume=tmp_path, progress=False)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == checkpoints
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_folder_inside_of_the_text_is_refused(tiny, some_text, tmp_path):
    """What is saved there would be read as text when the run is to go on."""
    (tmp_path / "text.py").write_bytes(some_text.data.numpy().tobytes())
    for out in (tmp_path / "out", tmp_path, tmp_path / "sub" / "out"):
        with pytest.raises(InputError, match="is inside of the text .*accepted: a folder outside of it"):
            train(tiny(text=tmp_path), out=out, progress=False)
    assert names(tmp_path) == ["text.py"]
    broken_off(tiny(text=tmp_path, checkpoint_every=2), tmp_path / ".out", 4)
    assert train(tiny(text=tmp_path), resume=tmp_path / ".out", progress=False).history[-1]["step"] == 12


@pytest.mark.parametrize("where, saved", [("save", 2), ("profile", 12)], ids=["in a save", "after the last step"])
def test_an_interruption_at_a_bad_moment_names_the_checkpoint_that_is_there(tiny, tmp_path, monkeypatch, where, saved):
    owner = {"save": checkpoint, "profile": loop}[where]
    real, calls = getattr(owner, where), []

    def interrupted(*arguments, **options):
        calls.append(1)
        if where == "profile" or len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(checkpoint.Interrupted, match=f"stopped after step {saved} of 12, saved in"):
        train(tiny(checkpoint_every=2), out=tmp_path, progress=False)
    monkeypatch.undo()
    assert train(tiny(), resume=tmp_path, progress=False).history[-1]["step"] == 12
    with pytest.raises(KeyboardInterrupt) as plain:  # nothing is saved yet, so nothing is claimed

        def at_once(row):
            raise KeyboardInterrupt

        train(tiny(), out=tmp_path / "other", progress=False, on_step=at_once)
    assert not isinstance(plain.value, checkpoint.Interrupted)


# A loss that is no number


def test_a_first_step_that_fails_does_not_claim_a_checkpoint(tiny, tmp_path):
    with pytest.raises(
        InputError, match="the loss is inf at step 1 .*a lower lr or l1 .*after step 0, is the one it began with$"
    ):
        train(tiny(l1=1e38), out=tmp_path, progress=False)
    assert names(tmp_path) == ["metrics.jsonl"]


def poison(monkeypatch, call):
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def clipped(*arguments, **options):
        calls.append(1)
        return clip(*arguments, **options) * (math.nan if len(calls) == call else 1)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipped)


def test_the_last_good_state_is_where_the_message_says(tiny, tmp_path, monkeypatch):
    """Also where that is not the folder resumed from. Resuming would repeat the step, so it says to begin anew."""
    broken_off(tiny(checkpoint_every=2), tmp_path / "first", 4)
    poison(monkeypatch, 1)
    with pytest.raises(
        InputError, match="at step 3 .*after step 2, is in '.*other', and .*: begin anew in another folder"
    ):
        train(tiny(), resume=tmp_path / "first", out=tmp_path / "other", progress=False)
    assert checkpoint.load(tmp_path / "other").step == 2


def test_a_validation_that_is_no_number_ends_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "bits_per_byte", lambda *_: math.nan)
    with pytest.raises(InputError, match="the loss is nan at step 4 .*after step 4, is in"):
        train(tiny(), out=tmp_path, progress=False)
    assert checkpoint.load(tmp_path).step == 4
    assert all("NaN" not in path.read_text() for path in tmp_path.rglob("*.json*"))


# Going on


def test_layers_that_changed_over_go_on_where_they_were(tiny, curve, tmp_path, monkeypatch):
    """Their paths and break-evens are in the checkpoint: the next rows are those of the unbroken run, bit for bit."""
    measured = []
    monkeypatch.setattr(
        switching.Switch,
        "measure",
        lambda switch, tokens: measured.append(1) or {name: 8.0 for name in ("layers.0.mlp", "layers.1.mlp")},
    )
    config = tiny(kernels="auto", l1=1.0, lr=0.05, warmup=2, steps=16, log_every=4, eval_every=8, checkpoint_every=14)
    whole = train(config, progress=False)
    broken_off(config, tmp_path, 16)
    saved = checkpoint.load(tmp_path)
    assert saved.step == 14 and saved.paths["layers"] == dict.fromkeys(("layers.0.mlp", "layers.1.mlp"), "twell")
    measured.clear()
    again = train(config, resume=tmp_path, progress=False)
    assert curve(again.history) == curve(whole.history) and not measured
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))
    assert checkpoint.load(tmp_path).paths["below"] == {"layers.0.mlp": 8.0, "layers.1.mlp": 8.0}


def test_processes_share_their_break_evens(tiny, monkeypatch):
    """Each process measures its own; with different break-evens they could take different paths."""

    class Two(parallel.World):
        def mean(self, values):  # the other one measured 20
            return (values + 20) / 2

    monkeypatch.setattr(
        switching.Switch, "measure", lambda switch, tokens: {"layers.0.mlp": 10.0, "layers.1.mlp": 20.0}
    )
    config = tiny(kernels="auto")
    run = running.Run(config, initial_model(config), config.text.tokens, Two(torch.device("cpu")))
    run.follow([14.0, 30.0], [0.0, 0.0])
    assert run.switch.below == {"layers.0.mlp": 15.0, "layers.1.mlp": 20.0}
    assert [layer.module.learning for layer in run.layers] == ["dense", "dense"]
    run.follow([13.0, 30.0], [0.0, 0.0])
    assert [layer.module.learning for layer in run.layers] == ["twell", "dense"]


@pytest.mark.parametrize("other", [False, True])
def test_processes_agree_whether_to_measure_again(tiny, tmp_path, other):
    """One of them is on another kind of device: all measure again, since it could not alone."""

    class Two(parallel.World):
        def any(self, flag):
            return flag or other

    config = tiny(kernels="auto")
    run = running.Run(config, initial_model(config), config.text.tokens, Two(torch.device("cpu")))
    state = run.state({})
    state.paths["below"] = {"layers.0.mlp": 3.0, "layers.1.mlp": 3.0}
    run.restore(state)
    assert run.switch.below == (None if other else state.paths["below"])


def test_a_run_goes_on_from_another_working_folder(some_text, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_bytes(some_text.data.numpy().tobytes())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--text", "mine.txt", "--steps", "2", *SMALL, "--out", "out"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["train", "--resume", "../out"]) == 0


def test_a_tokenizer_that_a_run_left_before_it_saved_anything_is_not_read(tiny, tmp_path):
    (tmp_path / "tokenizer.json").write_text("of a run that was killed")
    train(tiny(), out=tmp_path, progress=False)
    assert not list(tmp_path.rglob("tokenizer.json"))


def test_a_tokenizer_named_by_a_path_is_the_same_when_resumed(tiny, some_text, tmp_path):
    pytest.importorskip("tokenizers")
    path = load.load_any(some_text, tokenizer="bpe:280").tokenizer.save(tmp_path / "own.json")
    out = tmp_path / "out"
    broken_off(tiny(tokenizer=path, checkpoint_every=2), out, 4)
    assert train(tiny(tokenizer=path), resume=out, progress=False).history[-1]["step"] == 12


# What is said


def test_bits_per_byte_count_the_bytes_that_were_predicted(tiny, some_text):
    """Not those of the whole held-out text: few windows may hold longer tokens, or shorter ones."""
    pytest.importorskip("tokenizers")
    config = tiny(tokenizer="bpe:600", eval_windows=3)
    whole = load.load_any(some_text, tokenizer="bpe:600")
    held_out, lengths = whole.split()[1], whole.tokenizer.lengths
    windows = spread_windows(held_out.tokens, 3, 16)
    model = initial_model(config, 600)
    nats = sum(cross_entropy(model, window[None]).item() * 16 for window in windows)
    pieces = sum(len(whole.tokenizer.decode(window[1:])) for window in windows)
    assert bits_per_byte(model, windows, lengths) == pytest.approx(nats / math.log(2) / pieces, rel=1e-5)
    assert pieces / (3 * 16) != pytest.approx(held_out.bytes_per_token, rel=0.02)  # or this text shows nothing
    trained = train(config, progress=False)
    assert trained.validation_bits_per_byte == bits_per_byte(trained.model, windows, lengths)
    bytes_alone = spread_windows(some_text.data, 3, 16)
    assert bits_per_byte(initial_model(config), bytes_alone) == bits_per_byte(
        initial_model(config), bytes_alone, torch.ones(256)
    )


def test_a_validation_takes_no_more_memory_for_a_large_vocabulary(tiny, monkeypatch):
    model, sizes = initial_model(tiny(), 512), []
    windows = torch.randint(512, (20, 17))
    together = bits_per_byte(model, windows)
    assert objective.eval_batch(model, windows) == 64 and objective.eval_batch(torch.nn.Identity(), windows) == 64
    monkeypatch.setattr(objective, "EVAL_SCORES", 8 * 17 * 512)
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    assert bits_per_byte(model, windows) == pytest.approx(together, rel=1e-6) and sizes == [8, 8, 4]
    monkeypatch.setattr(objective, "EVAL_SCORES", 1)
    assert objective.eval_batch(model, windows) == 1


def test_a_warning_is_one_line_on_the_command_line(some_text, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.py").write_bytes(some_text.data.numpy().tobytes())
    silencing = "--steps=60 --d-ff=8 --l1=1e4 --lr=0.05 --warmup=0".split()
    asked = ["train", "--text", str(tmp_path / "text.py"), *SMALL, *silencing]
    shown = []
    monkeypatch.setattr(
        "warnings.showwarning", lambda *what: shown.append(__import__("warnings").formatwarning(*what[:4]))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filters", [])
        assert cli.main(asked) == 0
    said = [line for line in shown if "no neuron fires" in line]
    assert len(said) == 1 and said[0].startswith("\ntwell-lab: warning: step ") and said[0].strip().count("\n") == 0


@pytest.mark.parametrize("name, value", [("l1", 1e39), ("dead_window", 2**63)])
def test_numbers_that_no_tensor_holds_are_refused(tiny, name, value):
    with pytest.raises(InputError, match=f"^{name} is .*; accepted: a .*number from 0 "):
        tiny(**{name: value})


def test_training_through_the_kernels_leaves_the_global_generator_alone(tiny):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    train(tiny(kernels="sparse", steps=2), progress=False)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_summary_names_the_tokenizers_file_alone(tiny, tmp_path):
    kept = dict.fromkeys(
        ("history", "validation_bits_per_byte", "mean_nnz", "density", "dead", "text", "seconds", "tokens")
    )
    for given, shown in ((tmp_path / "own.json", "own.json"), ("bpe:300", "bpe:300"), (None, None)):
        result = TrainResult(torch.nn.Identity(), tiny(tokenizer=given), **kept)
        assert json.loads(json.dumps(result.summary()))["config"]["tokenizer"] == shown


@pytest.mark.parametrize("device", [torch.device("cpu"), 0])
def test_a_device_is_given_by_its_name(tiny, device):
    with pytest.raises(InputError, match="^device is .*; accepted: a device of torch's, such as 'cpu', .*, or None"):
        tiny(device=device)


def test_a_device_that_is_not_there_is_told_in_one_line(tiny):
    with pytest.raises(DeviceError, match=r"^device 'mps' is not there: .*; accepted here: cpu.*$") as refused:
        train(tiny(device="mps"), progress=False)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_a_device_without_numbers_is_refused(tiny):
    with pytest.raises(DeviceError, match="device 'meta' holds no numbers; accepted here: cpu"):
        train(tiny(device="meta"), progress=False)


def test_an_out_that_is_a_loop_of_links_is_refused(tiny, some_text, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.py").write_bytes(some_text.data.numpy().tobytes())
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="cannot save in .*loop"):
        train(tiny(text=tmp_path / "text"), out=tmp_path / "loop", progress=False)
    broken_off(tiny(checkpoint_every=2), tmp_path / "first", 4)
    with pytest.raises(InputError, match="cannot save in .*loop"):
        train(tiny(), resume=tmp_path / "first", out=tmp_path / "loop", progress=False)
