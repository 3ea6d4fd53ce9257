"""The command line: help, exit statuses, one-line errors, and JSON that parses."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import twell_lab as tl
from twell_lab import records
from twell_lab.analysis import planner
from twell_lab.app import analysis_commands, cli
from twell_lab.bench import forward
from twell_lab.core import InputError, TextError
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.training.text.prepared import load_any

ROOT = Path(__file__).parents[3]
COMMANDS = "doctor tour train prepare sample profile plan export bench record compile course submit records".split() + [
    "bench model"
]
ROW = {"kind": "ffn_forward", "device": "NVIDIA Example", "path": "twell", "ms": 0.5, "tokens": 4}
SMALL = "--steps 2 --batch 2 --context 16 --d-model 16 --heads 2 --layers 1 --d-ff 32 --device cpu".split()


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("a small text that is long enough for a few windows\n" * 200)
    return str(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with one synthetic record."""
    record = records.Record(
        name="example",
        purpose="a test's own",
        rows=[ROW],
        date="2026-01-02T03:04:05Z",
        commit=None,
        dirty=None,
        kernels={"gone": "0" * 64},
        machine={},
    )
    record.save(tmp_path / "records")
    return tmp_path / "records"


def ask(capsys, *arguments: str, status: int = 0) -> str:
    assert cli.main(list(arguments)) == status
    return capsys.readouterr().out


def joined(text: str) -> str:
    """The lines of a text that was folded as one."""
    return " ".join(text.split())


@pytest.mark.parametrize("command", [*COMMANDS, None])
def test_every_command_has_help_that_fits_a_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"] if command else ["--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and max(map(len, out.splitlines())) <= 80
    assert all(each in out for each in (["--json", f"twell-lab {command}"] if command else COMMANDS))


def test_help_and_version_load_neither_torch_nor_plotly():
    code = (
        "import sys; from twell_lab.app.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'plotly', 'cupy'} & set(sys.modules)))"
    )
    for argument in ("--help", "--version"):
        ran = subprocess.run(
            [sys.executable, "-c", code, argument],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert ran.returncode == 0 and "twell-lab" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["bench", "--tokens", "0"],
        ["bench", "--tokens", "x"],
        ["bench", "--dtype", "int8"],
        ["train", "--steps", "many"],
    ],
)
def test_a_mistyped_command_line_is_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and (told.startswith("twell-lab: ") and told.count("\n") == 1 or not arguments)


def test_an_interruption_is_one_line_and_status_130(capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(forward, "ffn", stop)
    assert cli.main(["bench", "--tokens", "1", "8"]) == 130
    assert capsys.readouterr().err == "\ntwell-lab: interrupted\n"


def test_doctor_speaks_to_people_and_to_programs(capsys):
    findings = json.loads(ask(capsys, "doctor", "--json"))
    assert findings and all(set(each) >= {"topic", "state", "text", "command"} for each in findings)
    shown = ask(capsys, "doctor")
    assert all(finding["text"] in joined(shown) for finding in findings)


def test_records_are_a_table_and_those_of_a_kind_flat_rows(capsys, folder):
    (what,) = json.loads(ask(capsys, "records", "--json", "--folder", str(folder)))
    assert what == {"kind": "example", "device": "NVIDIA Example", "date": "2026-01-02", "rows": 1, "state": "stale"}
    (row,) = json.loads(ask(capsys, "records", "example", "--json", "--folder", str(folder)))
    assert [*row] == list(records.FLAT_KEYS) and row["stale"] is True and row["ms"] == 0.5 and row["wall_ms"] is None
    assert "NVIDIA Example" in ask(capsys, "records", "example", "--folder", str(folder))
    assert cli.main(["records", "other", "--folder", str(folder)]) == 2
    assert "accepted: example" in capsys.readouterr().err
    shown = ask(capsys, "records")
    assert max(map(len, shown.splitlines())) <= 80 and len(shown.splitlines()) == len(records.load_all()) + 2


def test_what_does_not_fit_into_memory_is_one_line(capsys):
    assert cli.main(["bench", "--tokens", "99999999999", "--d-model", "64", "--d-ff", "64", "--nnz", "4"]) == 2
    assert "memory" in capsys.readouterr().err


def test_verify_answers_by_its_status(capsys, folder):
    answer = json.loads(ask(capsys, "records", "--verify", "--json", "--folder", str(folder), status=1))
    assert answer["holds"] is False and answer["kernels"] == records.kernel_hashes()
    entry = {"kernels": records.kernel_hashes(), "why": "a test", "date": "2026-01-02"}
    (folder / records.UNVERIFIED).write_text(json.dumps(entry))
    assert "a test" in ask(capsys, "records", "--verify", "--folder", str(folder))


def test_train_then_plan(capsys, tmp_path, text, monkeypatch):
    # Layers as small as these are predicted to be all launches, and on a busy machine the rates are measured wrong.
    monkeypatch.setattr(planner, "_REACH", math.inf)
    model, saved = str(tmp_path / "model"), tmp_path / "plan.json"
    ask(capsys, "train", "--text", text, "--out", model, "--json", *SMALL)
    given = ["plan", model, "--text", text, "--device", "cpu", "--windows", "8", "--tokens", "4"]
    rows = json.loads(ask(capsys, *given, "--out", str(saved), "--json"))
    assert {row["tokens"] for row in rows if row["chosen"]} == {4} and any(row["measured_us"] for row in rows)
    assert json.loads(saved.read_text())["inputs"] == "captured from the batches"
    loaded = LanguageModel.load(model)
    assert tl.sparsify(loaded, str(saved)) is loaded and {row["state"] for row in tl.report(loaded).rows} == {"planned"}
    assert cli.main([*given, "--calls", "captured"]) == 2 and "calls is 'captured'" in capsys.readouterr().err
    shown = ask(capsys, *given, "--predict-only", "--dtype", "bfloat16")
    assert "for CPU, bfloat16; predicted" in shown and "nothing was timed" in shown and "x dense" in shown
    assert "predicted us" in ask(capsys, *given, "--predict-only", "--all")


def test_train_then_profile(capsys, tmp_path, text):
    model, counts = str(tmp_path / "model"), str(tmp_path / "counts.json")
    asked = ["train", "--text", text, *SMALL, "--l1", "0.001", "--out", model]
    summary = json.loads(ask(capsys, *asked, "--json"))
    assert summary["config"]["l1"] == 0.001 and len(summary["density"]) == 1
    found = json.loads(ask(capsys, "profile", model, "--text", text, "--out", counts, "--json"))
    assert [row["d_ff"] for row in found["layers"]] == [32] and Path(counts).exists()
    assert found["by_position"][0]["first"] == 0 and found["against"] is None
    assert sum(row["count"] for row in found["by_token"]) == found["tokens"]
    # What was saved is shown again, with the same facts, and compared.
    again = json.loads(ask(capsys, "profile", counts, "--json"))
    assert {**again, "of": found["of"]} == found
    beside = json.loads(ask(capsys, "profile", model, "--text", text, "--windows", "2", "--against", counts, "--json"))
    assert beside["against"]["layers"][0]["other_density"] == found["layers"][0]["density"]
    shown = ask(capsys, "profile", counts, "--against", counts)
    assert "firing at positions 0: " in shown and "tokens at which most fire" in shown
    assert joined(shown).endswith("a plan made from one serves the other.")
    assert max(map(len, shown.splitlines())) <= 80
    assert cli.main(["profile", counts, "--text", text]) == 2 and "needs no --text" in capsys.readouterr().err
    assert cli.main(["profile", text]) == 2 and "text.txt' cannot be read as JSON" in capsys.readouterr().err
    assert cli.main(["profile", counts, "--against", "no/such.json"]) == 2 and "no/such" in capsys.readouterr().err
    assert "tokens of text.txt, validation part" in ask(capsys, "profile", model, "--text", text, "--windows", "2")
    (tmp_path / "other.txt").write_text(Path(text).read_text()[1:])
    shown = ask(capsys, "profile", model, "--text", str(tmp_path / "other.txt"), "--windows", "2", "--out", counts)
    assert "tokens of other.txt\n" in shown and f"profile: saved {counts}" in joined(shown)


def test_a_profile_is_drawn_into_a_page_and_a_picture(capsys, tmp_path, text, monkeypatch):
    plotly = pytest.importorskip("plotly.graph_objects")
    model, page, picture = str(tmp_path / "model"), tmp_path / "who.html", tmp_path / "who.png"
    ask(capsys, "train", "--text", text, *SMALL, "--out", model)
    asked = ["profile", model, "--text", text, "--windows", "2"]
    ask(capsys, *asked, "--html", str(page))
    drawn = page.read_text(encoding="utf-8")
    assert drawn.count("Plotly.newPlot(") >= 2 and not re.search(r"<(script|link)[^>]*(src|href)=", drawn)
    monkeypatch.setattr(analysis_commands, "find_spec", lambda name: name)
    monkeypatch.setattr(plotly.Figure, "to_image", lambda figure, format: f"a {format}".encode())
    ask(capsys, *asked, "--plot", str(picture))
    assert picture.read_bytes() == b"a png"
    monkeypatch.setattr(plotly.Figure, "to_image", lambda figure, format: (_ for _ in ()).throw(RuntimeError("\nlong")))
    for spec in ("kaleido", None):  # without Chrome, and without kaleido
        monkeypatch.setattr(analysis_commands, "find_spec", lambda name, spec=spec: spec)
        assert cli.main([*asked, "--plot", str(picture)]) == 2
        assert re.fullmatch(".*--plot needs kaleido.*\n", capsys.readouterr().err)
    assert cli.main([*asked, "--plot", "x.gif"]) == 2 and "accepted: " in capsys.readouterr().err


def test_one_field_of_a_file_of_records_is_read_where_it_is_named(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"said": f"words {i}", "number": 3}) for i in range(200)))
    (tmp_path / "a.csv").write_text("said,number\n" + "\n".join(f'"words, {i}",3' for i in range(200)))
    for name in ("a.jsonl", "a.csv"):
        path = str(tmp_path / name)
        with pytest.warns(UserWarning, match=f"{name} is read as plain text"):
            assert cli.main(["train", "--text", path, *SMALL]) == 0
        capsys.readouterr()
        assert cli.main(["train", "--text", f"{path}?field=said", *SMALL]) == 0
        assert capsys.readouterr().err == ""
        for field in ("other", "number" if name == "a.jsonl" else ""):
            assert cli.main(["train", "--text", f"{path}?field={field}", *SMALL]) == 2
            told = capsys.readouterr().err
            assert f"has no text in {field!r}; accepted" in told and told.count("\n") == 1
    for wrong in ("none.jsonl", "text.txt"):
        with pytest.raises(TextError, match="none.jsonl' .*No such file|a .jsonl or .csv file alone"):
            load_any(f"{tmp_path / wrong}?field=said")
    assert load_any(f"{tmp_path / 'a.csv'}?field=said").data.numpy().tobytes().startswith(b"words, 0\n\nwords, 1\n\n")


def test_what_is_no_text_and_no_ids_is_one_line(capsys, tmp_path):
    (tmp_path / "utf16.txt").write_text("words\n" * 500, encoding="utf-16")
    assert cli.main(["train", "--text", str(tmp_path / "utf16.txt"), *SMALL]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    model = LanguageModel(ModelConfig(d_model=16, layers=1, heads=2, d_ff=32, context=16))
    rows = pytest.importorskip("datasets").Dataset.from_dict({"input_ids": [[1, 2, 3] * 5]})
    for batches in (rows, rows.with_format("torch"), [torch.rand(2, 16)], "words"):
        with pytest.raises(InputError, match="accepted: ") as told:
            tl.profile(model, batches)
        assert "\n" not in str(told.value)


def test_train_then_thresholds(capsys, tmp_path, text):
    model, out = str(tmp_path / "model"), tmp_path / "thresholds.json"
    ask(capsys, "train", "--text", text, *SMALL, "--out", model, "--json")
    asked = ["thresholds", model, "--text", text, "--windows", "4"]
    found = json.loads(ask(capsys, *asked, "--sparsity", "0.8", "--out", str(out), "--json"))
    (row,) = found["thresholds"]
    assert row["layer"] == "layers.0.mlp" and row["activation density"] == pytest.approx(0.2, abs=0.02)
    loss, saved = found["loss"], tl.Thresholds.load(out)
    assert loss["windows"] == 4 and loss["low"] <= loss["change"] <= loss["high"] and "lossy" in loss["label"]
    assert loss["bits_per_byte"][0] == pytest.approx(loss["dense"] / math.log(2))  # its tokens are bytes
    assert saved.layers[0].thresholds == {"activation": row["activation threshold"]}
    tl.Thresholds.remove(saved.apply(LanguageModel.load(model)))
    shown = ask(capsys, *asked, "--method", "teal", "--greedy", "--out", str(out))
    (line,) = re.findall(r"in\s+Python:\n +(.*)", shown)  # what it says can be run as it stands
    lossy = eval(line, {"tl": tl})
    assert isinstance(lossy, LanguageModel) and "lossy" in str(lossy)
    assert "teal, sparsity 0.5, greedy" in shown and "bits a byte" in shown and shown.count("lossy") == 2
    for wrong, said in ((["--sparsity", "1"], "sparsity is 1.0"), (["--windows", "1"], "two or more windows")):
        assert cli.main([*asked, *wrong]) == 2 and said in capsys.readouterr().err


def test_bench_prints_rows_and_saves_records(capsys, tmp_path):
    small = "bench --tokens 1 2 --d-model 64 --d-ff 512 --nnz 8 --seconds 0.01 --device cpu --dtype float32".split()
    rows = json.loads(ask(capsys, *small, "--json"))
    assert {(row["tokens"], row["path"]) for row in rows} == {
        (tokens, path) for tokens in (1, 2) for name in ("dense eager", "twell") for path in (name, f"{name} (cold)")
    }
    shown = joined(ask(capsys, *small, "--out", str(tmp_path)))
    assert shown.count("bench: saved ") == 2 and len(records.load_all(tmp_path)) == 2


@pytest.fixture
def recordings(monkeypatch):
    """One named recording, which makes a synthetic record."""
    module = ModuleType("twell_lab.app.recordings")
    module.RECORDINGS = {"example": lambda: records.Record.new("example", "a test's own", [ROW])}
    module.make, module.options_of = lambda name, keep: module.RECORDINGS[name](), lambda name: set()
    monkeypatch.setitem(sys.modules, "twell_lab.app.recordings", module)
    monkeypatch.setattr(sys.modules["twell_lab.app"], "recordings", module, raising=False)


def test_a_named_recording_is_made_and_kept(capsys, tmp_path, recordings):
    assert ask(capsys, "record").split() == json.loads(ask(capsys, "record", "--json")) == ["example"]
    assert "saved" in ask(capsys, "record", "example", "--out", str(tmp_path))
    assert json.loads(ask(capsys, "record", "example", "--out", str(tmp_path), "--json"))["name"] == "example"
    assert len(records.load_all(tmp_path)) == 2
    assert cli.main(["record", "other"]) == 2 and "accepted: example" in capsys.readouterr().err


def test_the_course_is_written_and_never_overwrites(capsys, tmp_path):
    folder = tmp_path / "a new" / "folder"
    said = json.loads(ask(capsys, "course", str(folder), "--no-open", "--json"))
    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert said["notebooks"] == names == sorted(path.name for path in folder.glob("*.ipynb"))
    (folder / names[3]).write_text("mine")
    (folder / names[0]).unlink()
    assert names[3] in ask(capsys, "course", str(folder), "--no-open")
    assert (folder / names[3]).read_text() == "mine" and (folder / names[0]).exists()
    assert cli.main(["course", str(folder), "--no-open", "--alone"]) == 2
    assert "accepted: once pyproject.toml names one" in capsys.readouterr().err


def test_the_course_is_opened_in_jupyterlab_whose_status_it_gives_back(capsys, tmp_path, monkeypatch):
    (tmp_path / "jupyterlab.py").write_text("import sys; print(sys.argv[1:], flush=True); sys.exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["course", str(tmp_path / "mine")]) == 3
    assert "opening JupyterLab" in capsys.readouterr().err and (tmp_path / "mine").is_dir()
