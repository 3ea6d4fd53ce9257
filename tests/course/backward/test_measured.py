"""Recorded training steps as notebook 11 reads them: each kind of one record, by path, and what is said if there are none."""

import pytest
import torch

from tests.course.recorded_rows import record
from twell_lab.bench import training
from twell_lab.course.backward import measured
from twell_lab.course.roofline.data import LOGNORMAL, Rates
from twell_lab.ops import clock as clocks

RATES = Rates(tensor=800e12, memory=3e12, l2=8e12, source="a test")
WHERE = "recorded on NVIDIA H100 80GB HBM3, 2026-11-21"


def row(path: str, ms: float, nnz: float = 29.02, workload: str = LOGNORMAL, **more) -> dict:
    return {
        "kind": "training",
        "device": "NVIDIA H100 80GB HBM3",
        "dtype": "bfloat16",
        "tokens": 16384,
        "d_model": 2048,
        "d_ff": 5632,
        "gated": True,
        "nnz": nnz,
        "workload": workload,
        "path": path,
        "ms": ms,
        "spread": 0.01,
        "dense_ms": 6.0,
        "x_dense": 6.0 / ms,
        "x_compiled": 5.4 / ms,
        **more,
    }


def compared(nnz: float = 29.02, workload: str = LOGNORMAL, ms: float = 3.0, choice: str = "twell") -> list[dict]:
    return [
        row("dense eager", 6.0, nnz, workload, peak_bytes=1012 * 2**20),
        row("dense compiled", 5.4, nnz, workload),
        row("forced twell", ms, nnz, workload, peak_bytes=390 * 2**20),
        row("planned", ms, nnz, workload, choice=choice),
        row("planned compiled", 2.7, nnz, workload, choice=choice),
    ]


@pytest.fixture
def stored(keep):
    """A function that makes these lists of rows the records, oldest first."""

    def store(*each: tuple[str, list[dict]], kernels: tuple[str, ...] = ()) -> None:
        keep(
            *(record(name, f"2026-11-{20 + day}T00:00:00Z", rows, kernels) for day, (name, rows) in enumerate(each, 1))
        )

    return store


def placed(rows: list[dict]) -> list[dict]:
    return [each | {"where": WHERE} for each in rows]


def test_each_kind_is_of_one_record_the_newest_that_timed_most_of_it(stored):
    layer = "trained, L1 0.0001, layer 0"
    stored(
        ("training", compared(ms=4.0) + compared(8.01, ms=2.0)),
        ("training", compared(ms=3.0) + compared(8.01, ms=1.5) + compared(60.0, layer)),
        ("training", compared(ms=2.5) + compared(60.0, layer, ms=2.9)),
        ("inference", compared(60.0) + compared(90.0) + compared(120.0)),
    )
    rows = measured.recorded()
    told = [(each["workload"], each["ms"], each["where"][-10:]) for each in rows if each["path"] == "forced twell"]
    # Of a few neurons that fire often the second record timed two steps, the third one.
    assert told == [(LOGNORMAL, 3.0, "2026-11-22"), (LOGNORMAL, 1.5, "2026-11-22"), (layer, 2.9, "2026-11-23")]
    assert not measured.recorded("RTX")


def test_whole_models_are_those_of_the_newest_record_that_timed_them(stored):
    older, newer = (
        [each | {"ms": 50.0} for each in models()],
        [each for each in models() if "8 layers" in each["workload"]],
    )
    stored(("training", compared() + compared(8.01) + older), ("training", compared() + newer))
    rows = measured.recorded()
    small, large = ([each for each in rows if name in each["workload"]] for name in ("small", "step, 8 layers"))
    assert {each["ms"] for each in large} == {90.0} and {each["ms"] for each in small} == {50.0}
    assert large[0]["where"] == "recorded on NVIDIA H100 80GB HBM3, 2026-11-22" != small[0]["where"]
    layers = [each for each in rows if not each["workload"].startswith(measured.WHOLE)]
    assert len(layers) == 10 and {each["where"] for each in layers} == {small[0]["where"]}


def test_steps_of_other_numbers_of_tokens_and_graph_replays_are_not_read(stored):
    few, whole = (
        [each | more for each in compared()]
        for more in ({"tokens": 16}, {"tokens": 32768, "workload": "whole step, 8 layers"})
    )
    replayed = [each | {"path": f"{each['path']} (graph)"} for each in compared()]
    stored(("training", compared() + few + whole + replayed))
    rows = measured.recorded()
    assert len(rows) == len(compared()) + len(whole)
    assert {each["tokens"] for each in rows} == {measured.TOKENS, 32768}
    assert not any("graph" in each["path"] for each in rows)


def test_old_kernels_are_called_stale(stored):
    stored(("training", compared()), kernels=("gone",))
    assert measured.recorded()[0]["where"].endswith("; stale: code has changed since")


def test_steps_are_those_of_one_workload_in_order():
    rows = placed(compared() + compared(8.01) + compared(29.02, "overflow: 20% of rows"))
    assert [each["column"] for each in measured.steps(rows)][::5] == ["8", "29"]


def trained(nnz: float = 150.0) -> list[dict]:
    return compared(nnz, "trained, L1 0.0001, layer 2", ms=24.0, choice="dense")


def test_the_kinds_of_workload_are_told_apart():
    plain = [each | {"d_ff": 8192, "gated": False} for each in compared(40.0, f"{LOGNORMAL}, plain layer")]
    rows = placed(
        compared()
        + compared(29.2, "independent, uniform")
        + compared(31.0, "overflow: 1% of rows with a tile of 200")
        + plain
        + trained()
    )
    found = measured.series(rows)
    assert [len(each) for each in found.values()] == [5, 5, 5, 5] and list(found) == list(measured.KINDS.values())
    assert {each["workload"] for each in found["a few neurons fire often"]} == {LOGNORMAL}


def test_between_which_two_points_the_sparse_step_falls_behind():
    rows = compared(40.0, ms=4.0) + compared(80.0, ms=5.6)
    assert measured.between(rows, "dense compiled") == (40.0, 80.0)
    assert measured.between(rows, "dense eager") is None and measured.between(rows[:5], "dense compiled") is None
    assert measured.between([], "dense eager") is None


def models() -> list[dict]:
    """Of two models: the larger one sparse, the smaller one slower than compiled torch."""

    def of(workload: str, nnz: float, parameters: float, x: float, choice: str, d_model: int = 2048) -> list[dict]:
        shared = {"layers": 8, "parameters": parameters, "peak_bytes": 2**30, "x_compiled": x, "d_model": d_model}
        return [
            row(path, 90.0, nnz, workload, **shared, **({"choice": choice} if path.startswith("planned") else {}))
            for path in ("dense eager", "planned", "dense compiled", "planned compiled", "planned, compiled by layer")
        ]

    return of("whole step, small", 20.0, 5e7, 0.98, "0 of 8 layers sparse", 768) + of(
        "whole step, 8 layers", 30.0, 5e8, 1.3, "8 of 8 layers sparse"
    )


def test_whole_models_are_compared_like_with_like():
    large, small = measured.wholes(placed(compared() + models()))
    assert large["model"] == "8 layers of 2,048 x 5,632" and large["compiled"] == 1.3 and large["eager"] == 6.0 / 90.0
    assert small["model"] == "8 layers of 768 x 5,632" and small["choice"] == "0 of 8 layers sparse"
    assert large["mib"] == large["dense_mib"] == 1024 and large["where"] == WHERE
    assert measured.wholes(placed(compared())) == []


SIZES = {"dense": {"x": 3 * 2**20}, "sparse": {"x": 2**20}}


def test_three_lines_say_what_the_numbers_say():
    rows = placed(compared(8.01, ms=1.2) + compared(60.0, ms=3.0) + compared(120.0, ms=6.6, choice="dense"))
    time, memory, whole = measured.three_lines(rows + placed(models()), SIZES)
    assert time == f"Sparse: 5.0 times as fast at nnz 8; overtaken by compiled dense between 60 and 120; {WHERE}."
    assert (
        memory == "Kept: 3 MiB dense, 1 sparse." and whole == "Whole models, compiled: 0.98 to 1.30 times; there, too."
    )
    assert measured.three_lines(rows[:5], SIZES) == [f"Sparse: 5.0 times as fast at nnz 8; {WHERE}.", memory]
    other = [each | {"where": WHERE[:-2] + "25; stale: code has changed since"} for each in models()]
    assert measured.three_lines(rows + other, SIZES)[-1].endswith("times; 2026-11-25, stale.")
    both = [each for each in placed(models()) if "8 layers" in each["workload"]] + other[:5]
    assert measured.three_lines(rows + both, SIZES)[-1].endswith("times; there and 2026-11-25, stale.")
    own = [each | {"where": "yours, now, on my GPU"} for each in rows[:10]]
    assert (
        measured.own_line(own)
        == "Sparse, yours, now, on my GPU: 5.00 at nnz 8, 2.00 at nnz 60 times as fast as torch's."
    )


def test_without_a_record_everything_says_so(stored):
    stored()
    rows = measured.recorded()
    assert rows == [] and measured.steps(rows) == [] and measured.series(rows) == {} and measured.wholes(rows) == []
    assert measured.three_lines(rows, SIZES) == [measured.MISSING, "Kept: 3 MiB dense, 1 sparse."]
    assert measured.COMMAND in measured.MISSING


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to time")
def test_where_there_is_no_gpu_nothing_is_timed():
    assert measured.yours() == []


def test_your_own_steps_are_checked_and_come_as_rows(my_gpu):
    """Real layers on the CPU, and a clock that makes up its times."""
    layer, inputs = clocks.workload(32, 64, 256, 8, "lognormal", torch.bfloat16, "cpu")
    times = {"dense eager": [6.0, 6.0], "forced twell": [3.0, 3.0]}
    rows = measured.step_rows(layer, inputs, 8, lambda calls: times, lambda call: len(call(0)) * 2**20)
    assert [(each["path"], each["nnz"], each["x_dense"]) for each in rows] == [
        ("dense eager", 8, 1.0),
        ("forced twell", 8, 2.0),
    ]
    assert rows[0]["where"] == "yours, now, on My GPU" and rows[0]["peak_bytes"] == 5 * 2**20
    assert (rows[0]["tokens"], rows[0]["d_model"], rows[0]["d_ff"]) == (32, 64, 256)


def largest_gradient(rates: torch.Tensor, tokens: int, shrink: torch.Tensor) -> float:
    """Of torch's dense layer in float32, with neurons of these firing rates; shrink: what divides each one's `down`."""
    layer, (x, *_) = clocks.drawn(rates, tokens, measured.D_MODEL, torch.float16, "cpu", shrink=1.0)
    weights = [part.weight.float() for part in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    weights[2] /= shrink
    dy = measured.SIZE * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    asked = [each.requires_grad_() for each in (x.float(), *weights)]
    made = training.step_of(training.dense_layer, asked[1:], asked[:1], [dy])(0)
    return max(each.abs().max().item() for each in made)


def test_no_gradient_of_your_own_steps_is_more_than_float16_holds():
    """Of all tokens the busiest neurons, whose weights' gradients are the largest; of few tokens all neurons, for dx.
    Where torch's dense layer gives infinity, nothing is timed."""
    nnzs, room = (8.0, 29.0, 120.0), torch.finfo(torch.float16).max
    rates = [clocks.firing_rates(measured.D_FF, nnz) for nnz in nnzs]
    busiest = torch.cat([each.topk(16).values for each in rates])
    most = largest_gradient(busiest, measured.TOKENS, torch.tensor(nnzs).sqrt().repeat_interleave(16))
    for nnz, each in zip(nnzs, rates, strict=True):
        assert largest_gradient(each, 64, torch.tensor(nnz).sqrt()) < room / 4
    assert most < room / 4  # other draws, and what is rounded on the way
    assert most / measured.SIZE > room  # which is why they are made smaller


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    dense = training.dense_layer
    monkeypatch.setattr(training, "our_layer", lambda path: lambda x, gate, up, down: dense(x, gate, up, 2 * down))
    layer, inputs = clocks.workload(32, 64, 256, 8, "lognormal", torch.bfloat16, "cpu")
    with pytest.raises(clocks.WrongResult, match="a gradient is off by"):
        measured.step_rows(layer, inputs, 8, clock=lambda calls: pytest.fail("it was timed"))
