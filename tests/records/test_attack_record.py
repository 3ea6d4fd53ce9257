"""`twell-lab record attack`: what it runs with and without a GPU, what it records, and that a failure leaves no record."""

import json

import pytest
import torch

from twell_lab import core, records
from twell_lab.app import recordings
from twell_lab.bench import attack

SUITE = """def test_one(request):
    option = request.config.getoption
    import json
    said = [{"attack": "own", "cases": 7, "seed": option("--attack-seed")}]
    open(option("--attack-report"), "w").write(json.dumps(said))
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a tests/nightly/attack of its own and the options of the real one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "nightly" / "attack").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--attack-seed', type=int)\n    parser.addoption('--attack-report')\n"
    )
    (tmp_path / "tests" / "nightly" / "attack" / "test_own.py").write_text(SUITE)
    with monkeypatch.context() as patch:
        patch.setattr(records, "kernel_hashes", lambda: {"smxx_pack": "0" * 64})
        patch.setattr(core, "kernels_dir", lambda: tmp_path / "kernels")
        yield tmp_path


def test_without_a_gpu_the_suite_runs_and_its_counts_are_kept(checkout):
    record = recordings.attack(seed=3)
    assert record.rows[0] == {"attack": "own", "cases": 7, "seed": 3} and record.rows[1]["passed"] == 1
    assert record.notes["attack"] == {"seed": 3} and not records.stale(record)
    assert records.flat_rows([record]) == []  # no timing


def test_a_failure_leaves_no_record(checkout):
    (checkout / "tests" / "nightly" / "attack" / "test_own.py").write_text(
        "def test_wrong():\n    assert not 'seed 5, case 17'\n"
    )
    with pytest.raises(recordings.TestsFailed, match="seed 5, case 17"):
        recordings.attack()


def test_on_a_gpu_the_layers_are_attacked(monkeypatch):
    """Run on the CPU here, by the same function."""
    real, asked = attack.layers, {}

    def layers(seed, *, cases, seconds, device, processes):
        asked.update(cases=cases, seconds=seconds, device=device, processes=processes)
        found = real(seed, cases=4)
        found.kernels = {"smxx_pack"}  # which ran in other processes
        return found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attack, "layers", layers)
    monkeypatch.setattr(records.Record, "new", classmethod(lambda cls, *told, kernels: (*told, kernels)))
    name, _, (row,), notes, kernels = recordings.attack(seed=2)
    assert asked.pop("processes") == row["processes"] >= 1 and kernels == {"smxx_pack"}
    assert asked == {"cases": None, "seconds": 420.0, "device": "cuda"} and name == "attack" and "kernels" not in notes
    assert (
        row["layers"] == 4
        and row["cases"] > 20
        and row["rows"] > row["cases"]
        and row["excused_rows"] == 0
        and 0 < row["worst_ratio"] <= 1
    )
    json.dumps(row, allow_nan=False)
