"""`twell-lab record attack`: what it runs with and without a GPU, what it records, and that a failure leaves no record."""

import pytest
import torch

from twell_lab import core, records
from twell_lab.app import recordings
from twell_lab.core import InputError

OPTIONS = """def pytest_addoption(parser):
    for name in ("seed", "seconds"):
        parser.addoption(f"--attack-{name}", type=float)
    parser.addoption("--attack-report")
"""
SUITE = """def test_layers(request):
    option = request.config.getoption
    import json
    said = {"attack": "own", **{name: option(f"--attack-{name}") for name in ("seed", "seconds")}}
    open(option("--attack-report"), "w").write(json.dumps([said | {"kernels": ["smxx_pack"] * bool(said["seconds"])}]))
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a tests/nightly/attack of its own and the options of the real one."""
    attacks = tmp_path / "tests" / "nightly" / "attack"
    attacks.mkdir(parents=True), (tmp_path / "tests" / "gpu").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests" / "conftest.py").write_text(OPTIONS)
    (attacks / "test_layers.py").write_text(SUITE)
    (attacks / "test_other.py").write_text("def test_other():\n    pass\n")
    with monkeypatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes longer than all else
        patch.setattr(records, "kernel_hashes", lambda: {"smxx_pack": "0" * 64})
        patch.setattr(core, "kernels_dir", lambda: tmp_path / "kernels")
        yield attacks


def test_without_a_gpu_all_attacks_run_and_their_counts_are_kept(checkout, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record = recordings.attack(seed=3)
    assert record.rows[0] == {"attack": "own", "seed": 3, "seconds": None}
    assert record.rows[1]["passed"] == 2 and record.kernels == {}
    assert record.notes["attack"] == {"script": "tests/nightly/attack", "seed": 3} and not records.stale(record)
    assert records.flat_rows([record]) == []  # no timing
    with pytest.raises(InputError, match="seconds is 3.0 and there is no GPU here; accepted: with one"):
        recordings.attack(seconds=3.0)


def test_on_a_gpu_the_layers_are_attacked_for_some_minutes(checkout, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    record = recordings.attack(seed=2)
    assert record.rows[0] == {"attack": "own", "seed": 2, "seconds": 420.0}
    assert record.rows[1]["passed"] == 1 and record.kernels == {"smxx_pack": "0" * 64} and "kernels" not in record.notes
    assert recordings.attack(seconds=5.0).rows[0]["seconds"] == 5.0


def test_a_failure_leaves_no_record(checkout):
    (checkout / "test_layers.py").write_text("def test_layers():\n    assert not 'seed 5, case 17'\n")
    with pytest.raises(recordings.TestsFailed, match="seed 5, case 17"):
        recordings.attack()
