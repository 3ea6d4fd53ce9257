"""The sweep: which runs it makes, what a row says, and what is concluded from rows. Real trainings, tiny."""

import json

import pytest

from twell_lab.records import Record
from twell_lab.training import sweep

PLAN = {"LRS": (5e-3, 1e-2), "L1": (1e-3, 3e-2), "RENEWED": (3e-2,), "AGAIN": (3e-2,)}
PLAN["RENEW"] = {"reinit": 0.1, "dead_every": 4, "dead_window": 200}


@pytest.fixture(scope="module")
def base(tiny):
    return tiny(l1=0.0, steps=24, context=24, warmup=4, log_every=4, eval_every=12, eval_windows=60)


@pytest.fixture(scope="module")
def rows(base):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PLAN.items():
            patch.setattr(sweep, name, value)
        return [*sweep.sweep(base)]


def test_every_run_of_the_plan_is_made_once_and_at_the_best_rate(rows):
    labels = ["lr 0.005", "lr 0.01", "L1 0.001", "L1 0.03", "seed 1", "L1 0.03, seed 1", "L1 0.03, dead rows renewed"]
    assert [row["label"] for row in rows] == labels
    assert {row["config"]["lr"] for row in rows[2:]} == {sweep.twin(rows)["config"]["lr"]}
    assert all(len(f"{ce:.15g}".lstrip("0.").replace(".", "")) <= 5 for row in rows for ce in row["history"]["ce"])
    assert None in rows[0]["history"]["val_bits_per_byte"]
    assert rows[-1]["config"]["reinit"] == 0.1 and rows[-1]["config"]["dead_every"] == 4
    assert [row["config"]["seed"] for row in rows] == [0, 0, 0, 0, 1, 1, 0]
    firsts = {row["history"]["ce"][0] for row in rows if row["config"]["seed"] == 0}
    assert len(firsts) == 1  # the same text and weights
    saved = json.loads(Record.new("sweep", "a test", rows).to_json())["rows"]
    assert saved == rows and not any("text" in row["config"] or "device" in row["config"] for row in saved)


def test_counts_are_those_of_the_profile_by_layer_and_position(rows, base):
    starts = [*rows[0]["positions"]["start"], base.context]
    for row in rows:
        assert row["mean_nnz"] == pytest.approx(sum(layer["nnz"] for layer in row["layers"]) / 2, abs=0.01)
        for layer, nnz in zip(row["layers"], row["positions"]["nnz"], strict=True):
            whole = sum(one * (end - start) for one, start, end in zip(nnz, starts, starts[1:])) / base.context
            assert whole == pytest.approx(layer["nnz"], abs=2e-3)


def fake(label, bits, zeros, l1=0.0, **config):
    return {"label": label, "validation_bits_per_byte": bits, "zeros": zeros, "config": {"l1": l1, "lr": 1.0, **config}}


FAKES = [
    fake("lr 1", 2.0, 0.5),
    fake("lr 2", 2.2, 0.5),
    fake("L1 2", 2.3, 0.99, 2.0),
    fake("L1 1", 2.02, 0.98, 1.0),
    fake("seed 1", 2.01, 0.5),
    fake("L1 1, dead rows renewed", 2.0, 0.9, 1.0, reinit=0.1),
]


def test_the_twin_is_the_best_without_l1_and_the_cost_is_a_share_of_its_loss():
    assert sweep.twin(FAKES)["label"] == "lr 1"
    assert sweep.cost(FAKES[3], FAKES) == pytest.approx(0.01)
    assert [row["label"] for row in sweep.pressed(FAKES)] == ["lr 1", "L1 1", "L1 2"]
    other = fake("L1 1, seed 1", 2.211, 0.98, 1.0, seed=1)
    assert sweep.cost(other, [*FAKES, other]) == pytest.approx(0.1) and len(sweep.pressed([*FAKES, other])) == 3
    assert sweep.twin(FAKES, 1)["label"] == "seed 1" and sweep.twin(FAKES, 7)["label"] == "lr 1"
    assert sweep.seed_spread(FAKES) == pytest.approx(0.005) and sweep.seed_spread(FAKES[:4]) is None
