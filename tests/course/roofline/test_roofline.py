"""The work of a layer as notebook 09 computes it, on small rows made for these tests."""

import numpy as np
import pytest
import torch

from tests.course.recorded_rows import RATES, WHERE, compared, everything, gates, row
from twell_lab.course.hopper import data as hopper
from twell_lab.course.roofline import data as roofline
from twell_lab.formats import pool


def test_floors_name_what_limits_each_step():
    dense, gate, sparse = roofline.floors(roofline.work(16384, 2048, 5632, 29), RATES)
    assert (dense["limit"], gate["limit"], sparse["limit"]) == ("tensor cores", "tensor cores", "L2 cache")
    assert dense["floor_ms"] == pytest.approx(3 * gate["floor_ms"]) and gate["operations"] == 2 * 16384 * 2048 * 5632
    assert "operations a byte" in roofline.floors_table([dense, gate, sparse])
    one, *_ = roofline.floors(roofline.work(1), RATES)
    assert one["limit"] == "memory" and one["intensity"] < 2


def test_trials_on_other_tokens_are_set_beside_the_times():
    layer = {"l1": 0.001, "layer": 3}
    timed = [row("forced twell", 1.0, **layer), row("forced dense", 2.0, **layer), row("planned", 1.0, **layer)]
    tried = [
        row("plan: twell", 1.4, kind="plan", **layer),
        row("plan: dense", 2.1, kind="plan", **layer),
        row("plan: hot_cold 256", 9, kind="plan", **layer),
    ]
    told = roofline.other_tokens([*timed, *tried])
    assert told.startswith("In 1 of 2 trials") and told.endswith(
        "; the others:\n  twell in layer 3, L1 0.001: 1.40 times that"
    )
    assert (
        roofline.other_tokens([*timed, tried[1]]).endswith("timed here.")
        and roofline.other_tokens([]) == "No trained layer is recorded."
    )


def test_versions_are_explained_from_their_times():
    found = roofline.versions(gates())
    assert found[0]["path"] == "sm80 gate_pack" and all(each["idea"] for each in found)
    lines = roofline.gained(found).splitlines()
    assert lines[0] == "one kernel instead of two: 620 -> 580 us, 6.5% less time" and len(lines) == 4
    assert "2,727 ns longer" in roofline.packing_left(found) and "12.0% of it" in roofline.packing_left(found)
    assert "not faster" in roofline.packing_left(roofline.versions(gates(v3=0.6)))


def test_points_of_the_roofline():
    fused = {"gated_v3": {"ms": 0.5, "where": WHERE}, "pack_v1": {"ms": 1.0, "where": WHERE}}
    found = roofline.points(everything(), fused)
    names = [p["name"] for p in found]
    assert (
        "gated_v3" in names and "pack_v1" not in names and "twell, 1 token" in names and "dense eager, 1 token" in names
    )
    intensity = {p["name"]: p["operations"] / p["bytes"] for p in found}
    assert intensity["gate GEMM (torch), then pack"] < intensity["gate GEMM (torch)"] < intensity["sm90 gate_pack v3"]
    twice = [*everything(), *compared(27.3, tokens=1)]  # an older run of one token drew another nnz
    assert sorted(p["name"] for p in roofline.points(twice, fused)) == sorted(names)
    told = roofline.of_the_roof(found, roofline.datasheet())
    assert "tensor cores" in told and "memory" in told


def test_waves():
    assert roofline.waves(256 * 66, 256) == (1, 1.0) and roofline.waves(256 * 66 + 1, 256) == (2, 67 / 132)
    assert roofline.waves(16384, 5632)[0] == 22


def test_the_story_is_the_comment_at_the_top():
    told = roofline.story("smxx_gated.cu")
    assert told.startswith("gated: y = ") and "#include" not in told and "gated_v3" in told


@pytest.mark.parametrize("d_ff", [256, 600])
def test_words_and_pool_are_read_back(d_ff):
    generator = np.random.default_rng(0)
    gate = torch.from_numpy(generator.standard_normal((20, d_ff))).float() - 1.3
    gate[3, :60], gate[17, :200] = 1.5, 2.5
    gate = gate.to(torch.bfloat16)
    packed, beyond, lost = pool.packed_and_pool(gate)
    dense, found = roofline.read_back(packed, beyond, d_ff)
    assert found == lost.nonzero().flatten().tolist() == [17]
    kept = [i for i in range(20) if i not in found]
    assert torch.equal(dense[kept], gate[kept].float().relu())


def test_the_pool_table_follows_the_rule():
    rows = roofline.pool_table([40, 31, 100, 33, 0])
    assert [each["start"] for each in rows] == [0, None, 9, 78, None]
    assert [each["lost"] for each in rows] == [False, False, True, True, False]
    assert [line.split()[-1] for line in roofline.pool_text(rows).splitlines()[1:]] == ["pool", "lost", "lost"]


def test_hot_and_cold():
    assert roofline.break_even(RATES) == 0.01
    frequency = torch.tensor([0.5] * 256 + [0.0001] * 4864, dtype=torch.float64)
    rows = roofline.split(frequency, [0, 256, 512, 5120], RATES)
    assert min(rows, key=lambda each: each["ms"])["hot"] == 256
    assert rows[0]["dense"] == rows[0]["start"] == rows[-1]["sparse"] == rows[-1]["start"] == 0
    assert rows[1]["cold_nnz"] == pytest.approx(0.4864) and "256 neurons hot" in roofline.split_sentence(rows)
    even = roofline.split(torch.full((5120,), 0.005, dtype=torch.float64), [0, 256, 5120], RATES)
    assert roofline.split_sentence(even).startswith("TwELL, nothing hot")


def test_the_versions_that_are_recorded_are_those_explained():
    rows = [each for each in hopper.recorded() if each["kind"] == "gate"]
    assert {each["path"] for each in rows} == set(roofline.IDEAS)
    tokens, nnz = rows[0]["tokens"], rows[0]["nnz"]
    assert {each["idea"] for each in roofline.versions(rows, nnz, tokens)} == set(roofline.IDEAS.values())
