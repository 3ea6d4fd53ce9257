"""Plans as data: choices and their limits, the order of the neurons, files."""

import functools
import json
import math
import operator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell_lab.analysis.planner import Plan, chosen
from twell_lab.core import InputError, RecordError
from twell_lab.layers.choice import Candidate, Choice, LayerPlan
from twell_lab.layers.paths import hot_first


def candidate(tokens=64, path="dense", hot=0, chosen=True, measured=None):
    timed = {"dense_us": 2 * measured, "timed_on": "layers.0.mlp"} if measured else {}
    return Candidate(tokens, path, hot, 10.0, measured, chosen, "a test's", **timed)


def layer_plan(*candidates, d_ff=600, name="layers.0.mlp"):
    counts = tuple(range(d_ff))
    return LayerPlan(name, 32, d_ff, True, 1000, counts, candidates or (candidate(),))


@pytest.fixture
def plan():
    first = layer_plan(
        candidate(1, "twell"),
        candidate(64, chosen=False),
        candidate(64, "hot_cold", 256, measured=2.5),
        candidate(1, chosen=False),
    )
    return Plan(
        [first, layer_plan(name="layers.1.mlp")], "CPU", "float32", {"launch": 1e-6}, inputs="captured from the batches"
    )


@pytest.mark.parametrize(
    "path, hot, named",
    [
        ("sparse", 0, "'dense', 'twell', 'hot_cold'"),
        ("hot_cold", 100, "multiple of 256"),
        ("hot_cold", 0, "above 0"),
        ("twell", 256, "0 is accepted"),
    ],
)
def test_a_wrong_choice_is_refused(path, hot, named):
    with pytest.raises(InputError, match=named):
        Choice(path, hot)


@pytest.mark.parametrize(
    "rows, named",
    [
        ([candidate(1, "hot_cold", 512)], "hot is 512 of 512 neurons"),
        ([candidate(1), candidate(1, "twell")], "one for each is accepted"),
        ([candidate(1), candidate(64, chosen=False)], "one for each is accepted"),
    ],
)
def test_a_wrong_plan_of_a_layer_is_refused(rows, named):
    with pytest.raises(InputError, match=named):
        layer_plan(*rows, d_ff=512)


def test_a_class_holds_the_counts_up_to_its_name_and_the_last_all_beyond(plan):
    layer = plan.layers[0]
    assert [layer.choice(tokens).path for tokens in (0, 1, 2, 64, 9999)] == ["twell"] * 2 + ["hot_cold"] * 3
    assert layer.choices == {1: Choice("twell"), 64: Choice("hot_cold", 256)}


@given(d_ff=st.integers(1, 1500), steps=st.integers(0, 5), most=st.integers(0, 3), seed=st.integers(0, 99))
def test_the_order_is_a_permutation_with_the_hot_neurons_first(d_ff, steps, most, seed):
    hot = min(256 * steps, d_ff // 256 * 256)
    counts = torch.randint(0, most + 1, (d_ff,), generator=torch.Generator().manual_seed(seed))
    order = hot_first(counts, hot)
    assert order.dtype == torch.int64 and torch.equal(order.sort().values, torch.arange(d_ff))
    assert torch.equal(order[:hot], counts.argsort(descending=True, stable=True)[:hot])


def test_cold_neurons_that_fire_most_are_spread_over_the_tiles():
    counts = (1e6 / torch.arange(1, 5633).double() ** 1.5).long()[
        torch.randperm(5632, generator=torch.Generator().manual_seed(0))
    ]
    cold = counts[hot_first(counts, 512)[512:]].view(-1, 256).sum(1).double()
    assert cold.max() / cold.min() < 1.2
    by_count = counts.sort(descending=True).values[512:].view(-1, 256).sum(1).double()
    assert by_count.max() / by_count.min() > 10


def test_a_summary_says_which_paths_what_they_gain_and_what_stayed_dense(plan):
    assert plan.summary().splitlines() == [
        "up to 1 token: 1 twell, 1 dense; 1.00x dense together",
        "up to 64 tokens: 1 hot_cold, 1 dense; 1.20x dense together",
        "dense throughout: layers.1.mlp: a test's",
        "for CPU, float32; timed, eager calls",
    ]
    found = dict(tokens=64, choice="hot_cold 256", us=2.5, dense_us=5.0, x_dense=2.0, how="measured", why="a test's")
    assert chosen(plan.layers[0])[1] == dict(layer="layers.0.mlp", nnz=plan.layers[0].nnz) | found
    assert len(plan.table()) == 5 and "dense throughout: layers.1.mlp" in str(plan)


@pytest.mark.parametrize(
    "us, dense_us, unchanged", [(2.0, 1.0, True), (1.0, 1.0, True), (1.0, 1.2, False), (None, None, True)]
)
def test_a_layer_that_our_dense_path_makes_no_faster_can_stay_as_it_is(us, dense_us, unchanged):
    row = replace(candidate(), measured_us=us, dense_us=dense_us)
    layer = layer_plan(row)
    assert layer.unchanged == unchanged and not layer_plan(candidate(1, "twell"), row).unchanged
    assert chosen(layer)[0]["x_dense"] == (pytest.approx(1.2) if not unchanged else 1.0)


def test_a_plan_goes_through_a_file(plan, tmp_path):
    assert Plan.load(plan.save(tmp_path / "plan.json")) == Plan.load(tmp_path) == plan
    with pytest.raises(RecordError, match="cannot write"):
        plan.save(tmp_path / "plan.json" / "below")
    with pytest.raises(RecordError, match="finite numbers are accepted"):
        replace(plan, rates={"l2": math.nan}).save(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{")
    for name in ("plan.json", "missing.json"):
        with pytest.raises(RecordError, match="cannot be read"):
            Plan.load(tmp_path / name)


@pytest.mark.parametrize(
    "where, value, named",
    [
        (["format"], "twell-lab firing profile", "'format'"),
        (["version"], 3, "version 3"),
        (["layers"], 5, "'layers' is 5"),
        (["note"], "x", "note"),
        (["layers", 0, "d_ff"], 601, "600 neuron_counts"),
        (["layers", 0, "candidates", 2, "hot"], 300, "multiple of 256"),
        (["layers", 0, "candidates", 2, "predicted_us"], math.inf, "Infinity"),
        (["layers", 0, "candidates", 2, "why"], None, "'why' is None"),
        (["layers", 0, "candidates", 2, "chosen"], False, "one for each is accepted"),
    ],
)
def test_a_broken_file_is_refused(plan, tmp_path, where, value, named):
    path = plan.save(tmp_path / "plan.json")
    content = json.loads(path.read_text())
    functools.reduce(operator.getitem, where[:-1], content)[where[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=f"plan.json.*{named}"):
        Plan.load(path)
