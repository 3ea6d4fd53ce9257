"""Files that commit 6a4eca0 wrote, before the package had rooms, still mean today what they meant then.

One small file of each kind lies beside this test: a trained model, the checkpoint of a run that stopped after four of
its six steps (only the path of its text was shortened), that text, another one prepared, a plan and a record. expected.json holds what the same code said of them.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import twell_lab as tl
from twell_lab.app import cli
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.records import record as records
from twell_lab.training import checkpoint
from twell_lab.training.text.load import load_any

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text())


def test_a_model():
    model = LanguageModel.load(HERE / "model").eval()
    with torch.no_grad():
        logits = model(torch.arange(16)[None])[0, -1, :8]
    assert logits.tolist() == pytest.approx(EXPECTED["logits"], rel=1e-4, abs=1e-5)


def test_a_checkpoint_goes_on_as_the_unbroken_run_did(tmp_path):
    shutil.copytree(HERE / "stopped", tmp_path / "run")
    config = checkpoint.config_of(tmp_path / "run", text=HERE / "text.txt")
    result = tl.train(config, resume=tmp_path / "run", progress=False)
    assert len(result.history) == len(EXPECTED["history"]) == 6
    for now, then in zip(result.history, EXPECTED["history"], strict=True):
        for name in ("step", "loss", "ce", "l1_term", "nnz", "lr"):
            assert now[name] == pytest.approx(then[name], rel=1e-4), (name, then["step"])


def test_a_prepared_text():
    text = load_any(HERE / "prepared")
    training, held_out = text.split()
    assert (len(training.tokens), len(held_out.tokens)) == (1800, 200)
    assert bytes(training.tokens[:1800].tolist()) == (HERE / "text.txt").read_bytes()[:1800]


def test_a_plan_is_followed(tmp_path):
    plan = tl.Plan.load(HERE / "plan.json")
    assert (plan.release, plan.clock, plan.timed_on) == (None, None, {})  # which version 1 did not say
    assert tl.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert [[str(layer.choice(tokens)) for tokens in (1, 16)] for layer in plan.layers] == EXPECTED["choices"]
    model = LanguageModel(ModelConfig(d_model=8, layers=3, heads=1, d_ff=512, context=16)).eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        dense = model(tokens)
        torch.testing.assert_close(tl.sparsify(model, HERE / "plan.json")(tokens), dense, rtol=1e-4, atol=1e-4)
    assert {row["how"] for row in tl.report(model).rows} == {"predicted"}


def test_a_record():
    record = records.load(HERE / "record.json")
    rows = records.flat_rows([record])
    assert record.name == "ffn" and {row["path"] for row in rows} >= {"dense eager", "twell"}
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize(
    "name, load, said",
    [
        ("plan.json", tl.Plan.load, "has version 99; this release reads 1"),
        ("prepared/twell-lab-text.json", lambda path: load_any(path.parent), "99"),
        ("stopped/checkpoint-000004/state.json", lambda path: checkpoint.load(path.parents[1]), "is not of format 1"),
        ("model/config.json", lambda path: LanguageModel.load(path.parent), "is not of format 1"),
        ("record.json", records.load, "kernels is missing"),  # as every record since schema 2 has them
    ],
)
def test_what_this_release_does_not_know_is_a_typed_error(tmp_path, name, load, said):
    """The version of each kind of file is looked at: the tests above could not pass by ignoring it."""
    shutil.copytree(HERE, tmp_path / "files", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "files" / name
    fields = json.loads(path.read_text())
    key = next(key for key in ("version", "format", "schema") if type(fields.get(key)) is int)
    path.write_text(json.dumps(fields | {key: 99}))
    with pytest.raises(tl.TwellError, match=said):
        load(path)


def test_the_command_line_takes_them(capsys):
    model = str(HERE / "model")
    assert cli.main(["profile", model, "--text", str(HERE / "text.txt"), "--windows", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 1
