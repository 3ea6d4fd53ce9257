"""The sweep: which runs it makes, what a row says, and what is concluded from rows. Real trainings, tiny."""

import json

import pytest

from twell_lab.analysis.profile import profile
from twell_lab.records import Record
from twell_lab.training import sweep
from twell_lab.training.loop import initial_model
from twell_lab.training.text.source import spread_windows

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
    assert (
        len({row["history"]["ce"][0] for row in rows if row["config"]["seed"] == 0}) == 1
    )  # the same text and weights
    saved = json.loads(Record.new("sweep", "a test", rows).to_json())["rows"]
    assert saved == rows and not any("text" in row["config"] or "device" in row["config"] for row in saved)


def test_counts_are_those_of_the_profile_by_layer_position_and_byte(base):
    model, text = initial_model(base), base.text.split()[1].tokens
    windows = spread_windows(text, base.eval_windows, base.context).clamp(97, 98)  # two bytes, none of them rare
    counted, profiled = sweep.who_fires(model, windows), profile(model, [windows[:, :-1]])
    starts, by_byte = [*counted["positions"]["start"], base.context], counted["bytes"]
    assert counted["counted"] == sum(by_byte["count"]) == windows[:, :-1].numel() and by_byte["value"] == [97, 98]
    for layer, row, nnz in zip(profiled.layers, counted["layers"], counted["positions"]["nnz"], strict=True):
        assert row["nnz"] == pytest.approx(layer.mean_nnz, abs=1e-3) and row["dead"] == layer.dead
        whole = sum(one * (end - start) for one, start, end in zip(nnz, starts, starts[1:])) / base.context
        assert whole == pytest.approx(layer.mean_nnz, abs=2e-3)
    mean = sum(row["nnz"] for row in counted["layers"]) / 2
    of_bytes = sum(nnz * count for nnz, count in zip(by_byte["nnz"][0], by_byte["count"], strict=True))
    assert of_bytes / counted["counted"] == pytest.approx(mean, abs=0.01)


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


@pytest.mark.parametrize(
    "nnz, part, moved",
    [([90] * 9 + [8] * 3, 0.25, 0), ([9] * 12 + [6] * 3 + [3] * 3, 0.5, 3 / 9 - 1), ([0] * 12, 0.25, 0)],
)
def test_settled_compares_the_end_with_itself(nnz, part, moved):
    row = {"history": {"step": [*range(1, len(nnz) + 1)], "nnz": nnz}}
    assert sweep.settled(row, part) == pytest.approx(moved)
