"""`twell-lab bench model`: saved models and sizes, on one table with one sentence, and what is refused."""

import json
import re
import shutil
import socket

import pytest
import torch

import twell_lab as tl
from twell_lab import records
from twell_lab.app import bench_command, cli
from twell_lab.models.tiny import LanguageModel, ModelConfig

QUICK = "--tokens 16 --batches 2 --seconds 0.01 --device cpu".split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a small text that is long enough for a few windows\n" * 200)
    return str(path)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(d_model=16, layers=2, heads=2, d_ff=64, context=32))
    return str(model.save(tmp_path / "model"))


@pytest.fixture
def theirs(tmp_path, saved):
    """The same model as transformers reads it, with its tokenizer, in the words of a folder that is none of ours."""
    pytest.importorskip("transformers")
    folder = LanguageModel.load(saved).save_pretrained(tmp_path / "llama")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "rope_theta": 5000.0, "mlp_bias": False}))
    return str(folder)


def ask(capsys, *arguments, status=0):
    assert cli.main(["bench", "model", *arguments]) == status
    return capsys.readouterr()


@pytest.mark.parametrize("kind", ["saved", "theirs", "drawn"])
def test_a_table_and_a_sentence(capsys, request, text, kind):
    if kind == "drawn":
        pytest.importorskip("transformers")
        shown = ask(capsys, "1M", *QUICK).out
        assert "drawn 1M Llama, random weights: 1,1" in shown and "; random tokens" in shown
    else:
        shown = ask(capsys, request.getfixturevalue(kind), "--text", text, *QUICK).out
        assert "tokens of" in shown and "random" not in shown
        assert shown.startswith("LlamaForCausalLM: " if kind == "theirs" else "LanguageModel: ")
    lines = shown.replace("\n  ", " ").splitlines()  # as they were before they were folded
    (head,) = [i for i, line in enumerate(lines) if line.startswith("what ")]
    cells = [line.split("  ")[0] for line in lines[head + 1 : head + 5]]
    assert cells == 2 * ["forward, 1 x 16 tokens"] + 2 * ["decode step, batch 2"] and not lines[head + 5]
    assert re.search(r" x .*dense", lines[head]) and "mJ" not in lines[head]
    assert "neurons fire for a token" in lines[1] and "%" in lines[1] and "MiB dense" in lines[1]
    assert lines[-2] == "bench: no energy: it is read on an NVIDIA GPU alone"
    assert lines[-1].startswith("bench: of 4 comparisons the sparse model is ")


def test_json_is_a_record_and_out_keeps_it(capsys, saved, text, tmp_path):
    out = tmp_path / "kept"
    shown = ask(capsys, saved, "--text", text, *QUICK, "--training", "--out", str(out), "--json").out
    said = json.loads(shown)
    (record,) = records.load_all(out)
    assert said["rows"] == record.rows and record.name == "bench-model"
    assert {row["kind"] for row in record.rows} == {"model_forward", "model_decode", "model_training"}
    assert cli.main(["records", "--folder", str(out)]) == 0 and "model_decode" not in capsys.readouterr().err


def test_without_decoding_and_with_a_plan(capsys, saved, text, tmp_path):
    plan = str(tmp_path / "plan.json")
    small = ["--text", text, "--windows", "8", "--tokens", "16", "--predict-only", "--device", "cpu"]
    assert cli.main(["plan", saved, *small, "--out", plan]) == 0
    capsys.readouterr()
    said = json.loads(ask(capsys, saved, "--text", text, *QUICK, "--batches", "--plan", plan, "--json").out)
    assert [row["kind"] for row in said["rows"]] == 4 * ["model_forward"]


def test_bench_is_of_a_layer_and_with_a_model_of_that(capsys):
    assert "has no tokenizer" in refused(capsys, "1M", "--text", "no-text") and cli.main(["bench", "3B"]) == 2
    assert "there is no folder '3B'" in capsys.readouterr().err
    assert cli.main("bench --tokens 1 --d-model 8 --d-ff 16 --nnz 2 --seconds 0.01 --device cpu --json".split()) == 0
    assert {row["kind"] for row in json.loads(capsys.readouterr().out)} == {"ffn_forward"}


# ---- what is refused, in one line ----


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def refused(capsys, *arguments):
    shown = ask(capsys, *arguments, status=2)
    lines = [line for line in shown.err.splitlines() if line.startswith("twell-lab: ")]
    assert shown.out == "" and len(lines) == 1
    return lines[0]


def test_names_and_folders_that_are_no_model(capsys, offline, saved, tmp_path):
    pytest.importorskip("transformers")
    assert "cannot be reached" in refused(capsys, "SakanaAI/SparseLM2B", *QUICK)
    assert "there is no folder '3B'" in refused(capsys, "3B", *QUICK)
    cut = tmp_path / "cut"
    shutil.copytree(saved, cut)
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "no model can be loaded" in refused(capsys, str(cut), *QUICK)


def test_texts_that_are_too_short(capsys, saved, text, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("a short text " * 8)
    said = refused(capsys, saved, "--text", str(short), *QUICK)
    assert "text has 96 tokens, fewer than one batch needs: the largest workload takes 64" in said
    short.write_text("a short text")
    assert "at least 33" in refused(capsys, saved, "--text", str(short), *QUICK)
    said = refused(capsys, saved, "--text", text, *QUICK, "--batches", "1000")
    assert "fewer than one batch needs: the largest workload takes 32,000" in said
    assert "has no tokenizer" in refused(capsys, "1M", "--text", text, *QUICK)


def test_a_plan_of_another_model(capsys, saved, text, tmp_path):
    other = LanguageModel(ModelConfig(d_model=16, layers=3, heads=2, d_ff=64, context=32)).eval()
    plan = tl.plan(tl.profile(other, torch.randint(256, (4, 32))), other, tokens=(1,), measure=False)
    plan.save(tmp_path / "plan.json")
    assert "in the plan and missing in the model" in refused(
        capsys, saved, "--text", text, *QUICK, "--plan", str(tmp_path / "plan.json")
    )


# ---- what the sentence says ----


def rows(*walls, head=True, choice="2 dense, 3 twell", paths=("dense eager", "planned"), **more):
    """Rows of one workload with these times of each turn."""
    shared = {"kind": "model_decode", "workload": "Llama, decode step, batch 1", "head": head, **more}
    made = []
    for path, wall in zip(paths, walls, strict=True):
        ms = sorted(wall)[len(wall) // 2]
        made.append({**shared, "path": path, "wall_ms": ms, "wall_samples": wall, "tokens_per_s": 1e3 / ms})
        if not path.startswith("dense"):
            made[-1]["choice"] = choice
    return made


def test_a_difference_counts_where_three_quarters_of_enough_turns_show_it():
    faster = bench_command.pairs(rows([4.0, 2.0, 2.2, 2.2, 2.1], [2.0, 1.0, 1.1, 1.0, 1.0]))
    assert faster[0]["times"] == pytest.approx(2.2) and faster[0]["dense"] == pytest.approx(1e3 / 2.2)
    assert (faster[0]["unit"], faster[0]["how"], faster[0]["head"]) == ("tokens/s", "eager", "with")
    slower = bench_command.pairs(rows([1.0] * 5, [2.0, 2.0, 2.1, 2.0, 2.0], head=False))
    neither = bench_command.pairs(rows([1.0] * 5, [0.5, 1.0, 2.0, 1.0, 1.0]))
    few = bench_command.pairs(rows([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]))
    assert bench_command.conclusion(faster + slower + neither + few) == (
        "of 4 comparisons the sparse model is faster in 1 (at best 2.20 times as fast in decode step, batch 1, eager), "
        "slower in 1 (at worst 0.50 times as fast in decode step, batch 1 without the LM head, eager), "
        "neither faster nor slower in 1, not told apart in 1, which took fewer than 5 turns: give it more --seconds"
    )
    dense = bench_command.pairs(rows([1.0] * 5, [1.0, 0.9, 1.1, 1.0, 1.0], choice="5 dense"))
    assert "neither faster nor slower in 1; all layers stay dense" in bench_command.conclusion(dense)


def test_each_row_is_compared_with_the_dense_model_that_was_run_in_the_same_way():
    paths = ["dense eager", "planned", "planned for graphs", "dense compiled", "planned compiled"]
    paths += [f"{name} (graph)" for name in (*paths[:4], "planned for graphs compiled")]
    walls = [[float(ms)] * 3 for ms in (10, 5, 6, 8, 2, 9, 4, 3, 7, 2)]
    made = rows(*walls, paths=paths, mj_per_token=2.5, mj_spread=0.25, peak_bytes=2**21)
    found = [(each["how"], each["times"], each["mJ/token"], each["peak MiB"]) for each in bench_command.pairs(made)]
    ways = {"eager": 2.0, "compiled": 4.0, "CUDA graph": 9 / 4, "CUDA graph, planned for it": 3.0}
    ways |= {"compiled, CUDA graph, planned for it": 3.5}
    assert found == [(how, times, "2.5 to 2.5", "2 to 2") for how, times in ways.items()]


def test_what_was_left_out_is_told():
    record = records.Record.new("bench-model", "a test's own", [], {"left_out": {"training": "it does not fit"}})
    assert bench_command.told(record, "").startswith("bench: left out: training: it does not fit\n")
