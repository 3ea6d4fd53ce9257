"""The record of chosen neurons: two models trained on this CPU, and what each way of choosing costs."""

import pytest
import torch

from twell_lab.bench import predictors
from twell_lab.ops import clock
from twell_lab.records import Record
from twell_lab.training.config import TrainConfig

TINY = predictors.Shape(
    TrainConfig(
        d_model=32, layers=2, heads=2, d_ff=256, context=32, batch=4, steps=12, lr=3e-3, warmup=2, device="cpu"
    ),
    l1=1e-2,
    windows=4,
    rank=4,
    recalls=(0.5, 1.0),
    shares=(0.1, 1.0),
    sparsities=(0.9,),
    seconds=0.01,
)


@pytest.fixture(scope="module")
def trained():
    return predictors.Trained(TINY)


def test_a_row_says_what_was_chosen_and_what_it_cost(trained):
    rows = {row["path"]: row for row in predictors.chosen_rows(trained)}
    assert set(rows) == {
        "dense eager",
        "lossy: predicted, recall 50%",
        "lossy: predicted, recall 100%",
        "lossy: core neurons, 10%",
        "lossy: core neurons, 100%",
        "lossy: CATS 90%, computed densely",
        "lossy: TEAL 90%, computed densely",
        "lossy: TEAL 90%, forced kept_inputs",
        "trained with L1, dense",
        "trained with L1, forced twell",
    }
    Record.new("predictors", "a test's own", [*rows.values()])
    for row in rows.values():
        assert row["kind"] == "chosen_neurons" and row["ms"] > 0 and row["dense_ms"] > 0 and row["tokens"] == 1
        low, change, high = row["loss_change"]
        assert low <= change <= high
    assert rows["dense eager"]["loss_change"] == [0, 0, 0]
    assert rows["lossy: core neurons, 100%"]["loss_change"] == pytest.approx([0, 0, 0], abs=1e-4)
    assert rows["lossy: core neurons, 10%"]["sparsity"] == pytest.approx(0.9, abs=0.01)
    some, all_of_them = (rows[f"lossy: predicted, recall {recall}%"] for recall in (50, 100))
    assert some["sparsity"] > all_of_them["sparsity"] and abs(all_of_them["loss_change"][1]) < 1e-3
    assert rows["lossy: core neurons, 10%"]["loss"] != rows["dense eager"]["loss"]
    assert rows["trained with L1, dense"]["loss"] == rows["trained with L1, forced twell"]["loss"]


def test_nothing_is_timed_where_the_lossless_path_is_wrong(trained, monkeypatch):
    def broken(model, *args, **kwargs):
        torch.nn.init.zeros_(model.layers[0].mlp.down_proj.weight)
        return model

    monkeypatch.setattr(predictors, "sparsify", broken)
    monkeypatch.setattr(predictors, "_lossy", lambda trained: {})
    monkeypatch.setattr(predictors.rows, "clock_cpu", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(clock.WrongResult, match="forced twell"):
        predictors.chosen_rows(trained)
