"""Records that are made by running tests: of the GPU, file by file, and of the attacks; a failure leaves no record."""

from collections import defaultdict

import pytest
import torch

from twell_lab import core, records
from twell_lab.app import recordings

GOOD = "def test_one():\n    pass\n\n\nimport pytest\n\n\n@pytest.mark.skip(reason='here')\ndef test_two():\n    pass\n"
BAD = "def test_wrong():\n    assert 'the value' == 'another'\n"
OPTIONS = """def pytest_addoption(parser):
    parser.addoption("--attack-seconds", type=float)
    parser.addoption("--attack-report")
"""
SUITE = """def test_layers(request):
    option = request.config.getoption
    import json
    said = {"attack": "own", "seconds": option("--attack-seconds")}
    open(option("--attack-report"), "w").write(json.dumps([said | {"kernels": ["smxx_pack"] * bool(said["seconds"])}]))
"""


@pytest.fixture
def tests(tmp_path, monkeypatch):
    """tests/ of a checkout with a GPU and without sanitizers: no GPU test, and an attack of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(recordings.shutil, "which", lambda name: None)
    monkeypatch.setattr(core, "kernels_dir", lambda: tmp_path / "kernels")
    monkeypatch.setattr(records, "kernel_hashes", lambda: defaultdict(lambda: "0" * 64))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes longer than all else
    for folder in ("gpu", "nightly/attack"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests" / "conftest.py").write_text(OPTIONS)
    (tmp_path / "tests" / "nightly" / "attack" / "test_layers.py").write_text(SUITE)
    (tmp_path / "tests" / "nightly" / "attack" / "test_other.py").write_text("def test_other():\n    pass\n")
    return tmp_path / "tests"


def test_all_files_of_the_gpu_are_run_and_counted(tests):
    for name in ("test_a.py", "test_b.py"):
        (tests / "gpu" / name).write_text(GOOD)
    (tests / "gpu" / "helper.py").write_text("raise RuntimeError")
    record = recordings.gpu_tests()
    assert record.name == "gpu-tests" and {row["suite"] for row in record.rows} == {
        f"gpu tests: test_{x}" for x in "ab"
    }
    assert record.notes["gpu_tests"] == {"passed": 2, "failed": 0, "skipped": 2, "sanitizers": []}


def test_every_failure_is_told(tests, monkeypatch):
    for name, content in (("test_a.py", BAD), ("test_b.py", GOOD), ("test_c.py", BAD)):
        (tests / "gpu" / name).write_text(content)
    with pytest.raises(core.TwellError) as told:
        recordings.gpu_tests()
    assert "2 of 3 suites failed" in str(told.value) and "the value" in str(told.value)
    assert all(f"gpu tests: test_{x}" in str(told.value) for x in "ac") and "test_b" not in str(told.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(core.DeviceError, match="needs an NVIDIA GPU"):
        recordings.gpu_tests()


def test_without_a_gpu_all_attacks_run_and_their_counts_are_kept(tests, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record = recordings.attack()
    assert record.rows[0] == {"attack": "own", "seconds": None}
    assert record.rows[1]["passed"] == 2 and record.kernels == {}
    assert record.notes["attack"] == {"script": "tests/nightly/attack"} and not records.stale(record)
    assert records.flat_rows([record]) == []  # no timing


def test_on_a_gpu_the_layers_are_attacked_for_some_minutes(tests):
    record = recordings.attack()
    assert record.rows[0] == {"attack": "own", "seconds": 420.0}
    assert record.rows[1]["passed"] == 1 and record.kernels == {"smxx_pack": "0" * 64}


def test_a_failing_attack_leaves_no_record(tests):
    (tests / "nightly" / "attack" / "test_layers.py").write_text(
        "def test_layers():\n    assert not 'seed 5, case 17'\n"
    )
    with pytest.raises(core.TwellError, match="seed 5, case 17"):
        recordings.attack()
