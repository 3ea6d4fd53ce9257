"""tl.bench.model on small models on a CPU: what its rows say, that wrong results are not timed, and what is refused."""

import copy
import json
import time
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import twell_lab as tl
from tests.layers import models_of
from tests.models.tiny import test_model
from twell_lab import core
from twell_lab.app.bench_command import told
from twell_lab.bench import drawn, models, workloads
from twell_lab.bench.workloads import Causal
from twell_lab.core import DeviceError, InputError
from twell_lab.layers.choice import Choice
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.thresholds import calibrate
from twell_lab.models.tiny import ModelConfig
from twell_lab.ops import clock

pytest.importorskip("transformers")
SIZES = ModelConfig(vocabulary=64, d_model=16, layers=2, heads=2, d_ff=64, context=32)
QUICK = {"tokens": (16,), "batches": (2,), "seconds": 0.0, "progress": False}


def theirs(**changes):
    return models_of.build("Llama", **{"intermediate_size": 64, "max_position_embeddings": 64, **changes})


ours = partial(test_model.model, **vars(SIZES))


@pytest.mark.parametrize("make", [theirs, ours, lambda: SIZES], ids=["transformers", "ours", "drawn"])
def test_rows_say_what_was_measured(make):
    model = make()
    record = tl.bench.model(model, **{**QUICK, "tokens": (16, 64)}, training=True, plan="twell")
    found = [(row["kind"], row["tokens"], row["head"], row["path"]) for row in record.rows]
    paths = ("dense eager", "forced twell")
    assert found == [
        *(("model_forward", count, head, path) for count in (16, 64) for head in (True, False) for path in paths),
        *(("model_decode", 2, head, path) for head in (True, False) for path in paths),
        *(("model_training", 16, True, path) for path in ("dense eager", "planned")),
    ]
    name = "drawn Llama" if model is SIZES else type(model).__name__
    for row in record.rows:
        assert (row["d_model"], row["d_ff"], row["layers"], row["dtype"]) == (16, 64, 2, "float32")
        assert row["workload"].startswith(f"{name}, ") and 0 < row["nnz"] < 64 and len(row["nnz_layers"]) == 2
        rate = row["tokens"] / row["wall_ms"]
        if row["kind"] == "model_decode":
            assert row["tokens_per_s"] == pytest.approx(1e3 * rate)
            assert row["cached"] == (64 if name == "LlamaForCausalLM" else 32)
        else:
            assert row["tokens_per_ms"] == pytest.approx(rate)
        if row["path"] == "forced twell":
            assert row["choice"] == "2 twell" and 0 <= row["error_over_allowed"] <= 1
            assert row["x_dense"] == pytest.approx(row["dense_ms"] / row["ms"])
        assert "peak_bytes" not in row and "mj_per_token" not in row
    assert "2 x 32 tokens" in record.rows[4]["workload"] or "1 x 64 tokens" in record.rows[4]["workload"]
    assert "GPU" in record.notes["energy"] and "left_out" not in record.notes
    assert tl.records.flat_rows([record])[0]["kind"] == "model_forward" and json.loads(record.to_json())


def test_a_path_that_is_named_has_its_error_and_of_a_text_the_loss():
    model, text = ours(d_ff=512), torch.arange(600) % 64
    how = {**QUICK, "batches": (), "text": text}
    with torch.no_grad():
        ids = models.Bench(model, **how).turns(1, 16)[0]
        right = nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).item()
    for plan in ("twell", Choice("hot_cold", 256), "int8", "twell_int8"):
        choice = plan if isinstance(plan, Choice) else Choice(plan)
        record, lossy = tl.bench.model(model, **how, plan=plan), "lossy" in str(choice)
        assert [row["path"] for row in record.rows] == 2 * ["dense eager", f"forced {choice}"]
        for row in record.rows:
            whole = row["kind"] == "model_forward" and row["head"]
            assert ("loss" in row) == whole and 0 <= row["error"] < 1
            assert ("layer_error" in row) == (row["path"] != "dense eager")
            if whole and row["path"] == f"forced {choice}" and lossy:
                assert row["loss"] != right and row["error"] > 1e-5 and row["choice"] == f"2 {choice}"
            elif whole:
                assert row["loss"] == pytest.approx(right, abs=1e-5) and row["error"] < 1e-5
        assert f"{right:.4f} to " in told(record, "a text")
    with pytest.raises(InputError, match="hot is 0 on path 'hot_cold'"):
        tl.bench.model(model, **how, plan="hot_cold")
    with pytest.raises(DeviceError, match="path 'two_four'"):
        tl.bench.model(model, **how, plan="two_four")


def test_of_a_text_other_parts_are_profiled_planned_on_and_measured():
    bench = models.Bench(ours(vocabulary=800), **QUICK, text=torch.arange(800))
    profiled = bench.windows(models.PROFILED, 5, 40)
    planned = bench.windows(models.PLANNED_ON, 9, 40)
    measured = bench.turns(8, 40)
    assert measured.shape == (clock.ROTATED, 8, 40)
    assert (profiled.min(), profiled.max()) == (0, 199) and (planned.min(), planned.max()) == (200, 399)
    assert measured.min() == 400 and measured.max() == 799
    assert all((each.diff() == 1).all() for each in (profiled, planned, measured))
    for batch in measured:  # no sequence of a batch stands in another
        assert len(batch.unique()) == batch.numel()
    assert tl.bench.model(ours(), **QUICK, text=torch.arange(400) % 64).rows


def test_a_drawn_model_fires_as_a_profiled_one_does(tmp_path):
    trained = ours(layers=3, d_ff=40)
    with torch.no_grad():
        trained.layers[2].mlp.gate_proj.weight[8:] = 0.0  # 32 of 40 neurons never fire
    profiled = tl.profile(trained, torch.randint(64, (64, 32)))
    record = tl.bench.model(SIZES, **QUICK, firing=profiled.save(tmp_path / "profile.json"))
    assert record.rows[0]["workload"] == "drawn Llama firing as profiled, 1 x 16 tokens"
    wanted = [64 * profiled.layers[i].density for i in (0, 2)]  # the first of two layers, and the last
    assert record.rows[0]["nnz_layers"] == pytest.approx(wanted, rel=0.1) and wanted[1] < 0.4 * wanted[0]
    rates = drawn.rates_like(profiled, 5, 40)
    assert [each.sum().item() for each in rates[::2]] == pytest.approx([each.mean_nnz for each in profiled.layers])
    assert torch.equal(
        rates[4].sort().values, (profiled.layers[2].neuron_counts / profiled.tokens).double().sort().values
    )


@pytest.mark.parametrize("kind", ["Llama", "OPT", "GPT-2", "Mixtral", "ours", "ours, plain"])
def test_a_step_of_decoding_gives_what_the_whole_sequence_gives(kind):
    model = Causal(ours(gated=kind == "ours") if "ours" in kind else models_of.build(kind))
    ids = torch.randint(64, (3, 9))
    kept = model.keep(ids[:, :8])
    with torch.no_grad():
        for head in (True, False):
            step, whole = model.reader(head), model.reader(head)(ids)[:, -1:]
            for _ in range(2):  # and again, since it writes into the same place
                torch.testing.assert_close(step(ids[:, 8:], kept), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_model_is_not_timed(monkeypatch, dtype):
    def wrongly(model, *_, **__):
        tl.sparsify(model, "twell")
        with torch.no_grad():
            feed_forwards(model)[1].down.weight.mul_(1.5)
        return model

    model = ours().to(dtype)
    assert tl.bench.model(model, **QUICK, plan="twell").rows
    monkeypatch.setattr(models, "sparsify", wrongly)
    monkeypatch.setattr(clock, "time_bursts", lambda *_, **__: pytest.fail("it was timed"))
    for head, what in (("tokens", "1 x 16 tokens"), ("batches", "decode step, batch 2")):
        alone = {**QUICK, "tokens": (), "batches": (), head: QUICK[head]}
        with pytest.raises(clock.WrongResult, match=f"{what}: forced twell: the logits: off by"):
            tl.bench.model(model, **alone, plan="twell")


@pytest.mark.parametrize("method", ["cats", "teal", "wina"])
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_layers_with_thresholds_are_compared_one_by_one(monkeypatch, method, sparsity):
    """A right layer, in float32, keeps other values at its threshold than torch does in bfloat16."""
    torch.manual_seed(0)
    model, text = ours(d_ff=200), torch.randint(64, (2_000,))
    for layer in model.layers:
        layer.mlp.act_fn = nn.SiLU().eval()
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            nn.init.normal_(part.weight, std=1.5 / part.in_features**0.5)
    found = calibrate(model, text[:960].view(40, 24).split(8), method=method).at(sparsity)
    cut, wide = (found.apply(copy.deepcopy(model).to(dtype)) for dtype in (torch.bfloat16, torch.float32))
    right = {id(a.down.weight): b.module for a, b in zip(feed_forwards(cut), feed_forwards(wide), strict=True)}
    factor = 1.0

    def forward(self, x):
        (at,) = (i for i, layer in enumerate(feed_forwards(cut)) if torch.equal(layer.down.weight, self.down.weight))
        return factor * [*right.values()][at](x.float()).to(x.dtype)

    monkeypatch.setattr(SparseFFN, "forward", forward)
    rows = tl.bench.model(cut, **QUICK, text=text, plan=tl.Choice("dense")).rows  # which takes every layer
    assert all(0 < row["layer_over_allowed"] < 1 for row in rows if row["path"] != "dense eager") and len(rows) == 8
    factor = 1.06
    with pytest.raises(clock.WrongResult, match="1 x 16 tokens: forced dense: a layer: off by [23]"):
        tl.bench.model(cut, **QUICK, text=text, plan=tl.Choice("dense"))


def test_what_cannot_be_compiled_is_left_out_and_the_notes_say_why(monkeypatch):
    def compiled(call, **_):
        def fails(*_, **__):
            raise NotImplementedError("no such operator\nand more")

        return fails

    monkeypatch.setattr(torch, "compile", compiled)
    record = tl.bench.model(ours(), **QUICK, compiled=True, training=True)
    assert {row["path"] for row in record.rows} == {"dense eager", "planned"} and len(record.rows) == 10
    said = record.notes["left_out"]
    assert said["training, planned compiled"] == "NotImplementedError: no such operator"
    assert {"1 x 16 tokens, dense compiled", "decode step, batch 2, dense compiled"} <= set(said)


def test_a_step_that_gives_something_else_than_the_whole_sequence_is_left_out(monkeypatch):
    def keep(model, ids, real=Causal.keep):
        kept = real(model, ids)
        for _, values in kept.layers:
            values.mul_(2)
        return kept

    monkeypatch.setattr(Causal, "keep", keep)
    record = tl.bench.model(ours(), **QUICK, plan="twell")
    assert {row["kind"] for row in record.rows} == {"model_forward"}
    assert "a static cache gives something else" in record.notes["left_out"]["decode step, batch 2"]


def test_an_interruption_leaves_out_the_rest_and_loses_nothing(monkeypatch):
    real, asked = models.Bench.rows, []

    def interrupted(bench, *key):
        asked.append(bench.label(*key))
        if len(asked) > 1:
            raise KeyboardInterrupt
        return real(bench, *key)

    monkeypatch.setattr(models.Bench, "rows", interrupted)
    record = tl.bench.model(ours(), **QUICK)
    assert {(row["kind"], row["head"]) for row in record.rows} == {("model_forward", True)}
    forward, step = asked[0], "decode step, batch 2"
    left = [f"{forward} without the LM head", step, f"{step} without the LM head"]
    assert record.notes["left_out"] == dict.fromkeys(left, "interrupted")
    with pytest.raises(KeyboardInterrupt):
        tl.bench.model(ours(), **QUICK)


@pytest.mark.parametrize("seconds", [0.004, 0.7])
def test_energy_is_read_where_the_counter_moves(monkeypatch, seconds):
    """A counter that moves every 20 ms, of a GPU that takes 300 W while it computes and 100 else, also of calls that
    outlast what the counter needs to move. Reading it takes 1 ms."""
    spent = [0.0]  # millijoules, at each millisecond

    def pass_by(seconds, watts):
        spent.extend([spent[-1] + watts * (i + 1) for i in range(round(1e3 * seconds))])

    def read():
        pass_by(0.001, 100)
        return spent[(len(spent) - 1) // 20 * 20]

    calls = {"one": lambda turn: pass_by(seconds, 300)}
    monkeypatch.setattr(workloads.rows, "drain", lambda: None)
    monkeypatch.setattr(time, "perf_counter", lambda: (len(spent) - 1) / 1e3)
    facts = workloads.energy_facts(read, calls, samples=3, tokens=100)["one"]
    assert facts["mj_samples"] == pytest.approx([3_000 * seconds] * 3, rel=0.05)
    assert facts["mj_per_token"] == pytest.approx(3_000 * seconds, rel=0.05) and facts["mj_spread"] < 100
    assert len(spent) > 3e3 * (workloads.WARM + workloads.ENERGY)
    assert workloads.energy_facts(lambda: 7.0, calls, 3, 100) == {}  # it stands still


def half_swapped():
    return tl.sparsify(ours(), "twell", only=lambda name, module: "0" in name)


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(ours())


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: "SakanaAI/SparseLM2B", r"is a name; accepted: a model, such as tl.load\('SakanaAI/SparseLM2B'\), or"),
        (lambda: nn.Linear(3, 3), "Linear is no causal language model"),
        (lambda: theirs(hidden_act="silu"), "uses SiLU"),
        (lambda: ours().train(), "is in training mode; accepted: model.eval()"),
        (half_swapped, "1 feed-forward layers of LanguageModel are swapped already.* tl.densify"),
        (quantised, "accepted: .* a plain torch.nn.Linear"),
    ],
)
def test_models_that_are_refused(make, said):
    with pytest.raises(InputError, match=f"(?s){said}"):
        tl.bench.model(make(), **QUICK)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"tokens": (0,)}, "tokens is 0"),
        ({"tokens": (33,)}, "tokens has 33; accepted: up to 32, or a multiple of it"),
        ({"batches": (1.5,)}, "batches is 1.5"),
        ({"firing": "profile.json"}, "firing is given, and the model has its own"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"dtype": torch.bfloat16}, "dtype is given, and the model has its own"),
        ({"device": "cuda:7"}, "device is given, and the model has its own"),
        ({"text": "some text"}, "text is str; accepted: token ids"),
        ({"text": torch.zeros(100, dtype=torch.int64)}, "text has 100 tokens.*128 or more"),
        ({"text": torch.zeros(400, dtype=torch.int64, device="meta")}, "text is torch.int64.*; accepted: token ids"),
        ({"text": torch.full((400,), 64)}, "text has the token 64; accepted: token numbers from 0 to 63"),
        ({"plan": "auto"}, "'auto', neither a path .* nor a file; accepted"),
        ({"plan": tl.Choice("hot_cold", 256)}, "hot is 256 of 64 neurons"),
    ],
)
def test_arguments_that_are_refused(arguments, said):
    with pytest.raises((InputError, DeviceError), match=said):
        tl.bench.model(ours(), **{**QUICK, **arguments})


def test_a_training_step_takes_windows_of_two_tokens_and_more():
    record = tl.bench.model(ours(), **{**QUICK, "tokens": (1, 16)}, training=True, plan="twell")
    assert {row["tokens"] for row in record.rows if row["kind"] == "model_training"} == {16}
    record = tl.bench.model(ours(), **{**QUICK, "tokens": (1,), "batches": ()}, training=True, plan="twell")
    assert record.notes["left_out"]["training"] == "a step needs windows of two tokens or more" and record.rows


def test_a_size_that_is_larger_than_the_memory_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(core, "memory", lambda: 2**30)
    monkeypatch.setattr(drawn, "llama", lambda *_: pytest.fail("it was built"))
    with pytest.raises(InputError, match="15.5 GiB of memory, and this machine has 1.0"):
        tl.bench.model("2B", **QUICK, device="cpu")
    with pytest.raises(InputError, match="dtype is .*; accepted: bfloat16, float16 and float32"):
        tl.bench.model("1M", **QUICK, dtype=torch.int8)
