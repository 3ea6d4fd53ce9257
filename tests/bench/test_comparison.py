"""The comparison of products: patterns, checks, rows, and where a method begins to win; on this CPU."""

import math

import pytest
import torch

from twell_lab.bench import comparison
from twell_lab.bench.comparison import (
    LAYERS,
    MET,
    NESTED,
    PIECES,
    SCATTERED,
    SHARES,
    TWO_FOUR,
    Batch,
    Method,
    Read,
    Shape,
    crossings,
    patterned,
)
from twell_lab.core import DeviceError, InputError
from twell_lab.ops.clock import WrongResult
from twell_lab.records import Record
from twell_lab.sparsities.padding import add_padding

SMALL = Shape(64, 128, 32, torch.float32, "cpu", 0.02)


@pytest.mark.parametrize("pattern", PIECES)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999])
def test_a_pattern_keeps_whole_pieces_equally_many_in_each_band(pattern, sparsity):
    high, wide = PIECES[pattern]
    a = patterned(pattern, 96, 320, sparsity, dtype=torch.bfloat16, device="cpu")
    pieces = (a != 0).view(96 // high, high, 320 // wide, wide).transpose(1, 2).flatten(2)
    assert (pieces.all(-1) == pieces.any(-1)).all()
    assert (pieces.any(-1).sum(1) == max(1, round((1 - sparsity) * (320 // wide)))).all()
    assert a.abs()[a != 0].min() >= 0.09 and not torch.equal(
        a, patterned(pattern, 96, 320, 0, dtype=a.dtype, device="cpu", seed=1)
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((NESTED, 256, 256, 0.4), "0.4"),
        ((NESTED, 192, 256, 0.5), r"\[192, 256\]; multiples of 128"),
        (("checkered", 64, 64, 0.5), "'checkered'"),
        ((TWO_FOUR, 64, 64, 0.9), "0.9"),
        ((SCATTERED, 64, 64, 1.0), "1.0"),
        ((SCATTERED, 64, 64, -0.1), "-0.1"),
        (("blocks 32 x 32", 48, 64, 0.5), r"\[48, 64\]; multiples of 32"),
        (("tiles 32 x 1", 0, 64, 0.5), r"\[0, 64\]"),
    ],
)
def test_what_is_no_pattern_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        patterned(*given, dtype=torch.float32, device="cpu")


def test_rows_of_every_method_that_runs_here():
    made = comparison.product_rows(SCATTERED, 0.9, SMALL)
    Record.new("comparison", "a test", made)
    timed = [row for row in made if not row["path"].startswith("part: ")]
    assert timed[0]["path"] == "dense eager" and timed[0]["left_out"] == {}
    assert {row["path"] for row in timed[1:]} == {
        each.name for each in comparison.METHODS if each.measured(SCATTERED, 0.9, "cpu")
    }
    assert {f"part: {row['path']}, conversion" for row in timed[1:]} == {r["path"] for r in made} - {
        r["path"] for r in timed
    }
    for row in made:
        assert row["kind"] == "comparison" and row["ms"] > 0 and row["pattern"] == SCATTERED
        assert (row["tokens"], row["d_ff"], row["d_model"], row["nnz"]) == (64, 128, 32, 13)
        assert row["density"] == pytest.approx(13 / 128) and row["workload"] == "scattered, 90.0% zeros"
    assert all(row["wall_ms"] > 0 and row["x_dense"] == row["dense_ms"] / row["ms"] for row in timed)
    assert all(row["error_over_allowed"] <= comparison.WRONG for row in timed[1:])


def test_what_this_device_does_not_have_and_what_is_wrong_is_said_and_not_timed():
    def refuses(a):
        raise DeviceError("no such unit\nand more")

    def uncompiled(a):
        raise TypeError("'NoneType' object is not callable")  # torch's block product where there is no Triton

    product = lambda a, b: a @ b  # noqa: E731
    methods = [
        Method("missing", refuses, product),
        Method("uncompiled", uncompiled, product),
        Method("wrong", lambda a: a * 1.5, product),
        Method("nan", lambda a: a * math.nan, product),
        Method("right", lambda a: a, product),
        Method("elsewhere", lambda a: a, product, patterns=(TWO_FOUR,)),
        Method("too dense", lambda a: a, product, least=0.99),
    ]
    made = comparison.product_rows(SCATTERED, 0.9, SMALL, methods)
    assert [row["path"] for row in made] == ["dense eager", "right", "part: right, conversion"]
    assert made[0]["left_out"].keys() == {"missing", "uncompiled", "wrong", "nan"}
    assert made[0]["left_out"]["missing"] == "DeviceError: no such unit"
    assert made[0]["left_out"]["wrong"].startswith("wrong: a row is off by")


def test_two_four_in_blocks_is_multiplied_as_blocks_and_pruned_weights_as_layers():
    made = comparison.product_rows(NESTED, 0.75, Shape(256, 256, 32, torch.float32, "cpu", 0.02))
    bsr = "BSR 32 x 32 (torch)"
    assert [row["path"] for row in made] == ["dense eager", bsr, f"part: {bsr}, conversion"]
    assert made[0]["left_out"] == {} and made[1]["density"] == 0.25
    pruned = {each.name: each for each in comparison.METHODS if each.name.startswith("SparseLinear")}
    a, x = patterned(SCATTERED, 32, 64, 0.9, dtype=torch.float32, device="cpu"), torch.randn(5, 64)
    assert [*pruned] == ["SparseLinear (dense)", "SparseLinear (csr)"]
    for method in pruned.values():
        torch.testing.assert_close(method.multiply(method.convert(a), x), x @ a.t())


def _row(path, density, samples, dense):
    middle = sorted(samples)[len(samples) // 2]
    return {
        "kind": "comparison",
        "path": path,
        "pattern": SCATTERED,
        "density": density,
        "ms": middle,
        "x_dense": dense / middle,
        "samples": samples,
    }


def test_where_a_method_begins_to_win():
    times = {0.01: 0.5, 0.1: 2.0, 0.5: 8.0}
    table = [_row("dense eager", density, [1.0] * 4, 1.0) for density in times]
    table += [_row("some", density, [0.9 * ms, ms, ms, 1.1 * ms], 1.0) for density, ms in times.items()]
    table += [_row("never", density, [3.0] * 4, 1.0) for density in times]
    table += [_row("part: some, conversion", density, [9.0] * 4, 1.0) for density in times]
    some, never = crossings(table + [{"kind": "ffn_forward"}])
    assert some.density == pytest.approx(0.01 * 10**0.5)  # halfway between, on logarithmic axes
    assert some.low < some.density < some.high and (some.best, some.best_density) == (2.0, 0.01)
    assert (never.path, never.density, never.low, never.high) == ("never", None, None, None)


def test_sections_hold_every_pattern_and_sparsity():
    sections = comparison.sections(SMALL)
    assert [*sections] == ["products", "activations", "padding", "experts"]
    there = {(name, layer) for name, layers in comparison.shipped().items() for layer in range(layers)}
    assert {step.args[:2] for step in sections["activations"]} == there and ("small", 3) in there
    asked = [step.args[:2] for step in sections["products"]]
    patterns = len(PIECES) + 1  # and 2:4 in blocks
    assert len(set(asked)) == len(asked) == 1 + patterns * len(comparison.SPARSITIES) and asked[0] == (TWO_FOUR, 0.5)
    assert {step.args[:2] for step in sections["padding"]} == {(share, layers) for share in SHARES for layers in LAYERS}


def test_activations_of_a_trained_model_times_its_down_projection():
    made = comparison.activation_rows("small", 3, Read(256, torch.float32, "cpu", 0.02))
    Record.new("comparison", "a test", made)
    timed = [row["path"] for row in made if not row["path"].startswith("part: ")]
    assert timed == ["dense eager", "CSR (torch)", comparison.TILED] and made[0]["left_out"] == {}
    assert f"part: {comparison.TILED}, conversion" in {row["path"] for row in made}
    for row in made:
        assert row["kind"] == "activations" and (row["tokens"], row["d_ff"], row["d_model"]) == (256, 512, 128)
        assert row["workload"].startswith("layer 4 of small, on held-out Python") and row["ms"] > 0
        assert row["nnz"] == pytest.approx(512 * row["density"], abs=0.01) and 0.01 < row["density"] < 0.2
        assert row["density"] < row["occupied"] < 1 - (1 - row["density"]) ** 32  # neighbours share neurons
    assert {*MET} <= {each.name for each in comparison.METHODS}


FEW = Batch(4, 16, 32, 64, (4,), 48, 2, torch.float32, "cpu", 0.01)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("share", [0.25, 0.75, 1.0])
def test_padding_removed_beside_all_tokens(share, layers):
    dense, removed, alone = comparison.padding_rows(share, layers, FEW)
    Record.new("comparison", "a test", [dense, removed, alone])
    assert [each["path"] for each in (dense, removed, alone)] == ["dense eager", "padding removed", "real tokens alone"]
    assert alone["real"] == removed["real"] and alone["ms"] > 0
    assert removed["tokens"] == 64 and removed["real"] == pytest.approx(64 * share, abs=4)
    assert removed["x_dense"] == removed["dense_ms"] / removed["ms"] and removed["wall_ms"] > 0
    assert removed["layers"] == dense["layers"] == layers and removed["workload"].startswith(f"{layers} layer")


def test_what_padding_puts_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(comparison, "add_padding", lambda rows, padding: add_padding(rows.flip(0), padding))
    with pytest.raises(WrongResult, match="without padding: nothing was timed"):
        comparison.padding_rows(0.5, 2, FEW)


def test_ways_of_experts_beside_the_loop():
    made = comparison.experts_rows(4, FEW)
    Record.new("comparison", "a test", made)
    assert [row["path"] for row in made] == ["dense eager", "grouped", "padded", comparison.WHOLE]
    assert all(row["kind"] == "experts" and row["experts"] == 4 and row["d_ff"] == 48 for row in made)
    assert all(row["density"] == 0.5 for row in made)


def test_kernels_of_this_package_give_the_product_in_the_simulator(monkeypatch):
    """A method that only a GPU has runs here on a matrix of a few values, so that its call is known to fit."""
    a = patterned("blocks 32 x 32", 64, 64, 0.5, dtype=torch.bfloat16, device="cpu")
    b = torch.randn(64, 16).bfloat16()
    for method in comparison.METHODS:
        if method.name in ("csr_v3", "ell_v4", "coo_v4", "TwELL"):
            made = method.multiply(method.convert(a), b)
            assert comparison.off(made, a, b, a @ b) <= 1, method.name


def test_of_a_kernels_versions_the_one_that_is_taken_leads():
    paths = ["dense eager", "csr_v1", "csr_v3", "csr_v3", "csr_v2"]
    paths += ["part: csr_v2, conversion", "part: csr_v3, conversion"]
    rows = [{"path": path} for path in [*paths, "blocks_v2", "CSR (torch)", "mine_version"]]
    stay = ["dense eager", "csr_v3", "csr_v3", "part: csr_v3, conversion", "blocks_v2", "CSR (torch)", "mine_version"]
    assert [row["path"] for row in comparison.leading(rows)] == stay
