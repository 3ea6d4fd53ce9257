"""`twell-lab record attack`: what it runs with and without a GPU, what it records, and that a failure leaves no record."""

import json

import pytest
import torch

from twell_lab import core, records
from twell_lab.app import cli, recordings, tables
from twell_lab.bench import attack
from twell_lab.core import InputError

SUITE = """def test_one(request):
    option = request.config.getoption
    import json
    said = [{"attack": "own", "cases": option("--attack-cases") or 7, "seed": option("--attack-seed")}]
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
        "    for name in ('cases', 'seed'):\n        parser.addoption(f'--attack-{name}', type=int)\n    "
        "parser.addoption('--attack-report')\n"
    )
    (tmp_path / "tests" / "nightly" / "attack" / "test_own.py").write_text(SUITE)
    with monkeypatch.context() as patch:
        patch.setattr(records, "kernel_hashes", lambda: {"smxx_pack": "0" * 64})
        patch.setattr(core, "kernels_dir", lambda: tmp_path / "kernels")
        yield tmp_path


def test_without_a_gpu_the_suite_runs_and_its_counts_are_kept(checkout):
    record = recordings.attack(seed=3)
    assert record.rows[0] == {"attack": "own", "cases": 7, "seed": 3} and record.rows[1]["passed"] == 1
    assert record.notes["attack"] == {"script": "tests/nightly/attack", "seed": 3} and not records.stale(record)
    assert records.flat_rows([record]) == []  # no timing
    assert recordings.attack(cases=2).rows[0]["cases"] == 2


def test_a_failure_leaves_no_record(checkout):
    (checkout / "tests" / "nightly" / "attack" / "test_own.py").write_text(
        "def test_wrong():\n    assert not 'seed 5, case 17'\n"
    )
    with pytest.raises(recordings.TestsFailed, match="seed 5, case 17"):
        recordings.attack()


def test_seconds_are_for_a_gpu(checkout):
    with pytest.raises(InputError, match="seconds is 3.0 and there is no GPU here; cases is accepted"):
        recordings.attack(seconds=3.0)


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
    recordings.attack(cases=3)
    assert asked["cases"] == 3 and asked["seconds"] is None


@pytest.mark.parametrize(
    "how, left_out",
    [({"cases": 2000}, "1,996 of 2,000 layers"), ({}, "320 of 420 s"), ({"seconds": 60.0}, "0 of 60 s")],
)
def test_the_notes_say_how_much_an_interruption_left_out(how, left_out, monkeypatch, capsys):
    counts, clock = attack.layers(2, cases=4), iter([0.0, 100.0])

    def layers(seed, **how):
        raise attack.Interrupted(counts)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attack, "layers", layers)
    monkeypatch.setattr(recordings.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(records.Record, "new", classmethod(lambda cls, *told, kernels: told))
    _, _, (row,), notes = recordings.attack(seed=2, **how)
    assert notes["left_out"] == {"layers on a GPU": f"{left_out}: interrupted"} and notes["attack"]["seed"] == 2
    assert capsys.readouterr().err == f"layers on a GPU: left out {left_out}: interrupted\n"
    assert row["layers"] == 4 and row["cases"] == counts.cases and row["seconds"] == 100.0


def test_the_command_takes_them_for_the_attack_alone(monkeypatch, capsys):
    asked = {}
    monkeypatch.setitem(
        recordings.RECORDINGS,
        "attack",
        lambda seed=0, cases=None: (
            asked.update(seed=seed, cases=cases) or records.Record.new("attack", "a test's own", [{"attack": "x"}])
        ),
    )
    monkeypatch.setattr(records.Record, "save", lambda self, folder=None: "there")
    assert cli.main(["record", "attack", "--seed", "4", "--cases", "9"]) == 0 and asked == {"seed": 4, "cases": 9}
    assert cli.main(["record", "cpu", "--cases", "9"]) == 2
    assert "cpu takes no --cases; accepted: with attack" in capsys.readouterr().err


def test_the_table_of_the_readme():
    def record(date, gpu, rows):
        return records.Record(
            name="attack",
            purpose="a test's own",
            rows=rows,
            date=date,
            commit=None,
            dirty=None,
            kernels={},
            machine={"gpus": [{"name": "NVIDIA H100"}]} if gpu else {"gpus": []},
        )

    layers = {
        "attack": "layers on a GPU",
        "cases": 20000,
        "rows": 3000000,
        "excused_rows": 2,
        "overflowed_rows": 1,
        "rounded_rows": 0,
        "worst_ratio": 0.91,
    }
    made = [
        record("2026-01-01T00:00:00Z", False, [{"attack": "old", "cases": 1}]),
        record("2026-01-02T00:00:00Z", True, [layers]),
        record(
            "2026-01-03T00:00:00Z", False, [{"attack": "formats", "cases": 100000}, {"suite": "attack", "passed": 3}]
        ),
    ]
    lines = tables.attacks(made).splitlines()
    assert lines[2:] == [
        "| layers on a GPU | 20,000 | 3,000,000 | 3 | 0.91 | NVIDIA H100, 2026-01-02 |",
        "| formats | 100,000 |  |  |  | a CPU, 2026-01-03 |",
    ]
    cut = record("2026-01-04T00:00:00Z", True, [{**layers, "layers": 1234}])
    cut.notes["left_out"] = {"layers on a GPU": "766 of 2,000 layers: interrupted"}
    cut_line = (
        "| layers on a GPU (cut short after 1,234 layers) | 20,000 | 3,000,000 | 3 | 0.91 | NVIDIA H100, 2026-01-04 |"
    )
    assert tables.attacks([*made, cut]).splitlines()[2:] == [cut_line, lines[3]]
    assert "nothing is recorded yet" in tables.attacks([])
