"""The arena, tiny and on the CPU: who is timed, who is not and why, and what a rival's file has to have."""

import pytest
import torch

from twell_lab import records
from twell_lab.app import cli, recordings
from twell_lab.bench import arena
from twell_lab.core import InputError

ORIGIN = "repository, commit = 'example/kernels', '0123abc'\n"
RIGHT = "import torch\nfrom twell_lab.bench.arena import dense\n"
RIGHT += "def layer(given):\n    return lambda x: dense(x, *given[1:6])\n"
FILES = {
    "right": RIGHT,
    "wrong": RIGHT.replace("6])", "6]) * 1.1"),
    "narrow": RIGHT.replace("6])", "6])[:, 1:]"),
    "other": RIGHT.replace("6])", "6]).double()"),
    "broken": "def layer(given):\n    raise ValueError('sm_100 alone')\n",
    "silent": "def layer(given):\n    return None\n",
}
SAID = {"wrong": "WrongResult", "narrow": "[1, 31]", "other": "torch.float64", "broken": "ValueError: sm_100 alone"}
SAID["silent"] = "not for such a layer"
SIZES = {"nnz": 8, "d_model": 32, "d_ff": 256, "layers": 2}
CASES = [arena.Case(3, **SIZES, dtype=torch.float32), arena.Case(1, **SIZES, sparsity=0.5, dtype=torch.float16)]


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(ORIGIN + text)
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=("relu", "kept inputs"))
def test_what_is_right_is_timed_and_the_record_says_why_the_rest_is_not(folder, case):
    left_out = {}
    made = {row["path"]: row for row in arena.case_rows(case, arena.rivals_in(folder), left_out, 0.02)}
    ours = {"twell-lab: kept_inputs"} if case.sparsity else {"twell-lab: twell", "twell-lab: planned"}
    assert made.keys() == {"dense eager", "right"} | ours
    assert all(row["ms"] > 0 and 0 < row["error"] < 0.002 and row["layers"] == 2 for row in made.values())
    assert (made["right"]["repository"], made["right"]["commit"]) == ("example/kernels", "0123abc")
    assert "commit" not in made["dense eager"]
    assert {path.rpartition(", ")[2] for path in left_out} == SAID.keys()
    for path, why in left_out.items():
        assert SAID[path.rpartition(", ")[2]].replace("[1,", f"[{case.tokens},") in why


def test_a_layer_says_which_function_it_is():
    """What is cut is cut: the share that was asked for, of both, and more than rounding."""
    (layer, _), _ = CASES[1].make()
    share = (layer.x.abs() < layer.cut[0]).float().mean()
    assert abs(share - 0.5) < 0.05 and layer.activation == "silu"
    with pytest.raises(arena.clock.WrongResult, match="a row: off by"):
        layer.judge(arena.dense(*layer[:5]))


@pytest.mark.parametrize(
    "text, said",
    (
        (RIGHT, "has no repository"),
        (ORIGIN.replace("commit", "version") + RIGHT, "has no commit"),
        (ORIGIN.replace("'0123abc'", "7") + RIGHT, "has no commit"),
        (ORIGIN, "has no layer"),
        (ORIGIN + "import no_such_package", "no_such_package"),
        (None, "no file NAME.py"),
    ),
)
def test_a_file_without_its_origin_is_refused(tmp_path, text, said):
    if text is not None:
        (tmp_path / "theirs.py").write_text(text)
    with pytest.raises(InputError, match=said):
        arena.sections({}, tmp_path)


def test_the_command_takes_a_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(arena, "CASES", CASES[:1])
    monkeypatch.setattr(recordings, "need_gpu", lambda: None)
    assert cli.main(["record", "arena", "--rivals", str(folder), "--out", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").glob("arena-*.json")
    record = records.load(file)
    assert [row["path"] for row in record.rows][-1] == "right" and len(record.notes["refused"]) == len(SAID)
