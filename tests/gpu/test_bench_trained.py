"""What `twell-lab record trained` does, at a small size: compiled, through the sparse kernels, in graphs."""

from dataclasses import replace

import pytest

from twell_lab.bench import profiling, trained
from twell_lab.models.tiny import ModelConfig

pytestmark = pytest.mark.gpu


def test_every_section_of_the_record_of_a_trained_model():
    full = trained.Shape()
    sizes = {"d_model": 512, "layers": 2, "heads": 8, "d_ff": 2048, "context": 128}
    config = replace(full.config, **sizes, batch=64, steps=60, warmup=10, l1=3e-3, eval_every=30, eval_windows=64)
    shape = replace(
        full,
        config=config,
        forwards=(2, 160),  # one within what is captured as a graph, and one beyond
        cached=64,
        windows=64,
        questions=(100, 64, 16),
        seconds=0.0,
        reserve=0.0,
    )
    made = trained.Trained(shape, 1000.0)
    found = {name: [row for step in steps for row in step()] for name, steps in made.sections().items()}
    assert not made.left_out and all(found.values())
    (run,) = found["training with L1"]
    assert run["steps"] == 60 and run["dtype"] == "bfloat16" and "peak_bytes" in run["history"]
    quality = [*found["loss and answers"], *found["loss and answers, dense twin"]]
    assert [row["path"] for row in quality] == ["dense eager", "planned", "forced twell", "dense twin"]
    assert all(abs(row["loss_change"][1]) < 0.02 for row in quality[:3])
    assert {row["path"] for row in found["decode"]} >= {"planned for graphs (graph)", "forced twell (graph)"}
    assert {row["path"] for row in found["forward"]} >= {"planned", "planned for graphs (graph)", "forced twell"}
    for row in [*found["decode"], *found["forward"]]:
        assert row["dtype"] == "bfloat16" and row.get("error_over_allowed", 0) <= 1
        assert ("peak_bytes" in row) != row["path"].endswith("(graph)")


def test_what_profiling_takes():
    sizes = ModelConfig(d_model=512, layers=2, heads=8, d_ff=2048, context=128)
    plain, counted = profiling.profiling_rows(profiling.Shape(sizes))
    assert plain["extra_bytes"] == 0 and counted["extra_bytes"] < 2**30 and counted["times_plain"] > 0
