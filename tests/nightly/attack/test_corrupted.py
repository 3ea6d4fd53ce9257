"""Damaged files of every kind; and proof that a reader that takes them, or crashes over them, is seen."""

import json
import sys

import pytest

from tests.nightly.attack import corrupted
from tests.nightly.attack.harness import attack, isolated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds processes as Linux does")


def test_damaged_files(extent, report):
    counts = isolated("damaged files", "tests.nightly.attack.corrupted:check", **extent(4000))
    report("damaged files", {"cases": counts.pop("checked"), "by": {k: v for k, v in counts.items() if k != "cases"}})


@pytest.fixture
def one_kind(tmp_path, monkeypatch):
    """Have the attack know one kind of file alone, read by the function given."""

    def of(kind, read, guarded=()):
        monkeypatch.setattr(
            corrupted, "KINDS", {kind: (lambda folder: (folder / "it.json").write_text('{"value": 1.5}'), read, 1)}
        )
        monkeypatch.setattr(corrupted, "GUARDED", guarded)
        monkeypatch.setattr(corrupted, "_home", lambda: tmp_path)
        corrupted._pristine.cache_clear(), corrupted._right.cache_clear()

    yield of
    corrupted._pristine.cache_clear(), corrupted._right.cache_clear()


def test_a_reader_that_crashes_is_seen(one_kind):
    one_kind("own", lambda folder: json.loads((folder / "it.json").read_text())["value"])
    with pytest.raises(
        AssertionError, match="own: it.json, .*: (JSONDecodeError|KeyError|UnicodeDecodeError|FileNotFoundError)"
    ):
        attack("own", corrupted.check, seed=0, cases=30)


def test_a_reader_that_takes_what_was_not_written_is_seen(one_kind):
    def lenient(folder):
        try:
            return json.loads((folder / "it.json").read_text())["value"]
        except Exception:
            return 1.5

    one_kind("own", lenient, guarded=("own",))
    with pytest.raises(AssertionError, match="is not what was written"):
        attack("own", corrupted.check, seed=0, cases=40)


def hangs(r, counts):
    import time

    time.sleep(60 if r.random() < 0.3 else 0)


def crashes(r, counts):
    import ctypes

    if r.random() < 0.3:
        ctypes.string_at(0)


def takes_all_memory(r, counts):
    counts["here"] += 1
    if r.random() < 0.3:
        bytearray(1 << 50)


@pytest.mark.parametrize(
    "name, match",
    [("hangs", "not done within 1 s"), ("crashes", "the process ended: SIGSEGV"), ("takes_all_memory", "MemoryError")],
)
def test_what_hangs_crashes_or_takes_all_memory_is_a_failure_with_its_number(name, match):
    with pytest.raises(AssertionError, match=match) as told:
        isolated(
            name,
            f"tests.nightly.attack.test_corrupted:{name}",
            seed=0,
            cases=12,
            seconds=1.0 if name == "hangs" else 30.0,
        )
    assert "again: --attack-seed 0 --attack-case" in str(told.value)
