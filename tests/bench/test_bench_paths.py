"""The record of whole models on each path, tiny and on the CPU."""

from dataclasses import replace

import pytest
import torch

from twell_lab import records
from twell_lab.analysis.profile import profile
from twell_lab.app import recordings, tables
from twell_lab.bench import drawn, paths, workloads
from twell_lab.bench.causal import Causal
from twell_lab.core import DeviceError, InputError, RecordError
from twell_lab.layers.find import feed_forwards
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.sparsities.blocks import empty_share
from twell_lab.sparsities.two_four import is_two_four

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR)", "ignore:Sparse invariant")
LOSSY = ("int8", "twell_int8", "predicted", "experts", "kept_inputs, TEAL 50%")  # what a CPU runs
TINY = drawn.Shape(
    layers=2,
    d_model=64,
    d_ff=512,
    heads=2,
    vocabulary=64,
    context=32,
    sequences=3,
    cached=16,
    least=3,
    most=20,
    mean=10,
    device="cpu",
)


@pytest.fixture(scope="module")
def made():
    """The rows of each section, and what was left out."""
    left_out = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "_SECONDS", 0.0)
        found = {
            name: [row for step in steps for row in step()] for name, steps in paths.sections(TINY, left_out).items()
        }
    return found, left_out


def test_each_model_is_measured_on_the_paths_that_its_weights_allow(made):
    found, left_out = made
    lossy, teal = [f"forced {path} (lossy)" for path in LOSSY], f"forced {LOSSY[-1]} (lossy)"
    expected = {
        "drawn Llama": ["dense eager", "forced twell", "forced hot_cold", *lossy],
        "drawn Llama with 2:4 weights": ["dense eager"],
        "drawn Llama with empty blocks": ["dense eager", "forced blocks"],
        "trained small model": ["dense eager", "forced twell", *lossy],
    }
    for name, ways in expected.items():
        assert [row["path"] for row in found[name]] == 4 * ways
        assert [row["tokens"] for row in found[name][:: len(ways)]][:2] == [1, 16]
        for row in found[name]:
            assert row["workload"].startswith(f"{name}, ") and row["head"] and 0 <= row["error"] < 2
            if "lossy" not in row["path"]:
                assert row["error"] < 1e-5 and row.get("error_over_allowed", 0) <= 1
                assert row.get("layer_error", 0) < 1e-5
            else:
                assert row["error"] > 1e-6 and 1e-3 < row["layer_error"] < 1
                assert row["choice"].endswith(" kept_inputs" if row["path"] == teal else "(lossy)")
            assert ("layer_error" in row) == row["path"].startswith("forced")
    assert {key for key in left_out} == {
        "drawn Llama, fp8",
        "drawn Llama with 2:4 weights, two_four",
        "trained small model, fp8",
    }
    assert "GPUs of 8.0 and newer" in left_out["drawn Llama with 2:4 weights, two_four"]


def test_the_trained_model_has_a_loss_on_each_path(made):
    rows = [row for row in made[0]["trained small model"] if row["kind"] == "model_forward"]
    losses = {row["path"]: row["loss"] for row in rows[-7:]}  # of the last workload
    assert 1 < losses["dense eager"] < 2.5 and losses["forced twell"] == pytest.approx(losses["dense eager"], abs=1e-4)
    for path in LOSSY:
        assert 1e-6 < abs(losses[f"forced {path} (lossy)"] - losses["dense eager"]) < 0.2
    assert not any("loss" in row for row in made[0]["drawn Llama"])


def test_pruned_drawn_models_are_so_and_fire_as_asked():
    for subject in paths.SUBJECTS[1:3]:
        model = drawn.fired(TINY, torch.float32, mask=subject.mask)
        for found in feed_forwards(model):
            for part in (found.gate, found.up, found.down):
                if subject.paths == ("two_four",):
                    assert is_two_four(part.weight)
                else:
                    assert empty_share(part.weight, 32) >= 0.875
        if subject.paths == ("two_four",):  # of so few blocks a row many neurons have none
            fired = [layer.mean_nnz for layer in profile(model, torch.randint(64, (64, 32))).layers]
            assert sum(fired) / 2 == pytest.approx(10, rel=0.4)


def test_a_record_is_made_of_it(made, monkeypatch, tmp_path):
    found, _ = made
    row = found["trained small model"]
    monkeypatch.setattr(paths, "sections", lambda shape, refused: refused.update(a="b") or {"all": [lambda: row]})
    record = recordings.make("model-paths", seconds=5)
    assert record.notes["refused"] == {"a": "b"} and records.load(record.save(tmp_path)).rows == record.rows
    lines = tables.model_paths([record]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        f"| trained small model: {path}" for path in ("twell", *(f"{each} (lossy)" for each in LOSSY))
    ]
    assert all(" (dense 1." in line for line in lines[2:])
    for key, wrong in (("loss", float("nan")), ("error", "none")):
        with pytest.raises(RecordError, match=rf"rows\[0\].{key} is .*; accepted: a finite number"):
            replace(record, rows=[{**row[0], key: wrong}])


def test_what_is_wrong_or_fails_is_left_out_and_the_others_are_timed(monkeypatch):
    torch.manual_seed(0)
    dense = Causal(LanguageModel(ModelConfig(vocabulary=64, d_model=16, layers=2, heads=2, d_ff=64, context=32)).eval())
    tokens, left_out = workloads.Tokens(64, torch.device("cpu")), {}
    models = workloads.Models(dense, tokens, "a test's", 16)
    names = [models.force(path, {32}) for path in ("twell", "int8", "dense")]
    with torch.no_grad():
        work = workloads.forward(tokens, 2, 16, "last").expect(models.exact)
        models.sparse["forced dense"].model.head.weight.mul_(2)
        models.sparse["forced int8 (lossy)"].model.head.weight.mul_(float("nan"))
    assert workloads.right_ones(models, work, names, left_out) == ["forced twell"]
    assert sorted(left_out) == [f"a test's, 2 x 16 tokens, forced {path}" for path in ("dense", "int8 (lossy)")]
    assert all("are off by" in why for why in left_out.values())

    def fails(*_):
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(models.sparse["forced twell"], "reader", lambda *_, **__: fails)
    assert workloads.right_ones(models, work, names[:1], left_out) == []
    assert left_out["a test's, 2 x 16 tokens, forced twell"] == "no kernel image"
    with pytest.raises(DeviceError, match="path 'fp8'"):
        models.force("fp8", {32})
    with pytest.raises(InputError, match="has 64 neurons, too few for the path 'hot_cold' to split"):
        models.force("hot_cold", {32})
