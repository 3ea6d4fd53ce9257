"""The record of decoding, tiny and on the CPU: each way says what it took, and tokens are compared before any clock."""

import pytest
import torch

import twell_lab as tl
from twell_lab.bench import decoding
from twell_lab.models.tiny import ModelConfig
from twell_lab.ops import clock

pytest.importorskip("transformers")
SIZES = ModelConfig(vocabulary=64, d_model=32, layers=2, heads=2, d_ff=96, context=64)
FEW = {"PROMPT": 8, "NEW": 8, "BATCHES": (1, 2), "ROUNDS": 1}


@pytest.fixture(scope="module", autouse=True)
def few():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        for name, value in FEW.items():
            patch.setattr(decoding, name, value)
        yield


@pytest.fixture(scope="module")
def both(few):
    return decoding.models(SIZES)


def test_each_way_says_what_it_took_of_both_models(both, monkeypatch):
    monkeypatch.setattr(decoding, "models", lambda size: both)
    steps = decoding.sections(size=SIZES)
    assert {name: len(steps[name]) for name in steps} == {"batch 1": 2, "tl.generate": 1, "generate": 1}
    steps["tl.generate"] = [steps["batch 1"][0], *steps["tl.generate"]]  # the other one compiles for minutes
    for way in ("tl.generate", "generate"):
        made = [row for step in steps[way] for row in step()]
        assert [row["path"] for row in made] == [f"{way}, dense", f"{way}, planned"] * len(steps[way])
        for row in made:
            assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"], rel=1e-6)
            assert row["same"] == 1 and row["first_ms"] > 0 and row["workload"].endswith(f"batch {row['batch']}")


def test_other_tokens_are_not_timed(both, monkeypatch):
    said = iter([torch.zeros(1, 16, dtype=torch.int64), torch.ones(1, 16, dtype=torch.int64)])
    monkeypatch.setitem(decoding.WAYS, "wrong", lambda *_: next(said))
    monkeypatch.setattr(decoding, "_walls", lambda call, rounds: rounds * [1.0])
    with pytest.raises(clock.WrongResult, match="planned, batch 8: not even the first"):
        decoding.decoding_rows(lambda: both, "small", "wrong", 8)


def test_thresholds_decode_beside_the_dense_model(monkeypatch):
    sizes = ModelConfig(vocabulary=64, d_model=64, layers=2, heads=4, d_ff=128, context=64)
    made = [row for steps in decoding.eight(sizes=sizes).values() for step in steps for row in step()]
    assert [row["path"] for row in made] == [
        f"tl.generate, {name}" for name in ("dense", "thresholds 50%", "dense", "thresholds 65%")
    ]
    assert all(row["tokens_per_s"] > 0 and row["first_ms"] > 0 for row in made)

    def silenced(model, path):
        for parameter in model.parameters():
            parameter.data.zero_()
        return tl.sparsify(model, path)

    monkeypatch.setattr(decoding, "sparsify", silenced)
    with pytest.raises(clock.WrongResult, match="50%"):
        decoding.thresholded(sizes)(0.5)
