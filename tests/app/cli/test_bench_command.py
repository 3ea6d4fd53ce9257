"""`twell-lab bench model`: saved models and sizes, on one table with one sentence, and what is refused."""

import json
import shutil
import socket

import pytest
import torch

import twell_lab as tl
from twell_lab import records
from twell_lab.app import bench_command
from twell_lab.models.tiny import LanguageModel, ModelConfig

QUICK = "--tokens 16 --batches 2 --seconds 0.01 --device cpu".split()


@pytest.fixture
def theirs(tmp_path, model):
    """The same model as transformers reads it, with its tokenizer, in the words of a folder that is none of ours."""
    pytest.importorskip("transformers")
    folder = LanguageModel.load(model).save_pretrained(tmp_path / "llama")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "rope_theta": 5000.0, "mlp_bias": False}))
    return folder


@pytest.mark.parametrize(
    "kind, begins",
    [("model", "LanguageModel: "), ("theirs", "LlamaForCausalLM: "), ("1M", "drawn 1M Llama, random weights: 1,1")],
)
def test_a_table_and_a_sentence(ask, request, text, kind, begins):
    asked = ["bench", "model", "1M" if kind == "1M" else request.getfixturevalue(kind), *QUICK]
    shown = ask(*asked, *(["--text", text] if kind != "1M" else [])).out
    assert shown.startswith(begins) and ("; random tokens" in shown) == (kind == "1M")
    lines = shown.replace("\n  ", " ").splitlines()  # as they were before they were folded
    table = [line for line in lines if line.startswith(("what ", "forward, ", "decode "))]
    assert len(table) == 5 and "dense" in table[0] and "neurons fire for a token" in lines[1] and "%" in lines[1]
    assert lines[-2] == "bench: no energy: it is read on an NVIDIA GPU alone"
    assert lines[-1].startswith("bench: of 4 comparisons the sparse model is ")


def test_json_is_a_record_and_out_keeps_it(ask, value, model, text, tmp_path):
    said = value("bench", "model", model, "--text", text, *QUICK, "--training", "--out", tmp_path / "kept")
    (record,) = records.load_all(tmp_path / "kept")
    assert said["rows"] == record.rows and record.name == "bench-model"
    assert {row["kind"] for row in record.rows} == {"model_forward", "model_decode", "model_training"}


def test_without_decoding_and_with_a_plan(ask, value, model, text, tmp_path):
    out, small = tmp_path / "swapped", ["--windows", "8", "--tokens", "16", "--predict-only", "--device", "cpu"]
    ask("sparsify", model, "--text", text, *small, "--out", out)
    said = value("bench", "model", model, "--text", text, *QUICK, "--batches", "0", "--plan", out)
    assert [row["kind"] for row in said["rows"]] == 4 * ["model_forward"]


def test_of_a_layer_rows_are_printed_and_records_saved(ask, value, tmp_path):
    small = "bench --tokens 1 2 --d-model 64 --d-ff 512 --nnz 8 --seconds 0.01 --device cpu --dtype float32".split()
    assert {(row["kind"], row["tokens"], row["path"]) for row in value(*small)} == {
        ("ffn_forward", tokens, path) for tokens in (1, 2) for path in ("dense eager", "twell")
    }
    shown = " ".join(ask(*small, "--out", tmp_path).out.split())
    assert shown.count("bench: saved ") == 2 and len(records.load_all(tmp_path)) == 2


def test_what_is_no_model_or_does_not_go_together_is_told(refused, monkeypatch, model, text, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setattr(socket, "getaddrinfo", None)  # no network in tests
    monkeypatch.setattr(socket.socket, "connect", None)
    cut, short, plan = tmp_path / "cut", tmp_path / "short.txt", tmp_path / "plan.json"
    shutil.copytree(model, cut)
    (cut / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:5000])
    short.write_text("a short text")
    (tmp_path / "few.txt").write_text("a short text " * 8)
    other = LanguageModel(ModelConfig(d_model=16, layers=3, heads=2, d_ff=64, context=32)).eval()
    tl.plan(tl.profile(other, torch.randint(256, (4, 32))), other, tokens=(1,), measure=False).save(plan)
    for arguments, said in (
        (["SakanaAI/SparseLM2B"], "cannot be reached"),
        (["3B"], "there is no folder '3B'"),
        ([cut], "no model can be loaded"),
        (["1M", "--text", text], "has no tokenizer"),
        ([model, "--text", tmp_path / "few.txt"], "text has 96 tokens, fewer than one batch needs: the largest work"),
        ([model, "--text", short], "at least 33"),
        ([model, "--text", text, "--batches", "1000"], "the largest workload takes 32,000"),
        ([model, "--text", text, "--plan", plan], "in the plan and missing in the model"),
    ):
        assert said in refused("bench", "model", *QUICK, *arguments)


def rows(*walls, head=True, choice="2 dense, 3 twell", paths=("dense eager", "planned"), **more):
    """Rows of one workload with these times of each turn."""
    shared = {"kind": "model_decode", "workload": "Llama, decode step, batch 1", "head": head, **more}
    made = []
    for path, wall in zip(paths, walls, strict=True):
        made.append({**shared, "path": path, "wall_ms": sorted(wall)[len(wall) // 2], "wall_samples": wall})
        if not path.startswith("dense"):
            made[-1]["choice"] = choice
    return made


def test_a_difference_counts_where_three_quarters_of_enough_turns_show_it():
    faster = bench_command.pairs(rows([4.0, 2.0, 2.2, 2.2, 2.1], [2.0, 1.0, 1.1, 1.0, 1.0]))
    assert faster[0]["times"] == pytest.approx(2.2) and (faster[0]["dense"], faster[0]["sparse"]) == (2.2, 1.0)
    slower = bench_command.pairs(rows([1.0] * 5, [2.0, 2.0, 2.1, 2.0, 2.0], head=False))
    neither = bench_command.pairs(rows([1.0] * 5, [0.5, 1.0, 2.0, 1.0, 1.0]))
    few = bench_command.pairs(rows([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]))
    assert bench_command.conclusion(faster + slower + neither + few) == (
        "of 4 comparisons the sparse model is faster at 1 (at best 2.20 times as fast: decode step, batch 1), slower at "
        "1 (at worst 0.50 times as fast: decode step, batch 1 without the LM head), neither at 1, where the difference "
        "lies within the spread of the samples, not told apart in 1, which took fewer than 5 turns: give it more "
        "--seconds"
    )
    dense = bench_command.pairs(rows([1.0] * 5, [1.0, 0.9, 1.1, 1.0, 1.0], choice="5 dense"))
    said = bench_command.conclusion(dense)
    assert "neither at 1" in said and "; all layers stay dense" in said


def test_each_row_is_compared_with_the_dense_model_that_was_run_in_the_same_way():
    paths = ["dense eager", "planned", "planned for graphs", "dense compiled", "planned compiled"]
    paths += [f"{name} (graph)" for name in (*paths[:4], "planned for graphs compiled")]
    walls = [[float(ms)] * 3 for ms in (10, 5, 6, 8, 2, 9, 4, 3, 7, 2)]
    made = rows(*walls, paths=paths, mj_per_token=2.5, peak_bytes=2**21)
    pairs = bench_command.pairs(made)
    assert {pair["what"].removeprefix("decode step, batch 1"): pair["times"] for pair in pairs} == {
        **{"": 2.0, ", compiled": 4.0, ", CUDA graph": 9 / 4, ", CUDA graph, planned for graphs": 3.0},
        ", compiled, CUDA graph, planned for graphs": 3.5,
    }
    assert {(pair["mJ/token"], pair["peak MiB"]) for pair in pairs} == {("2.5 to 2.5", "2 to 2")}


def test_what_was_left_out_is_told():
    record = records.Record.new("bench-model", "a test's own", [], {"left_out": {"training": "it does not fit"}})
    assert bench_command.told(record, "") == (
        "bench: left out: training: it does not fit\nbench: nothing could be compared"
    )
