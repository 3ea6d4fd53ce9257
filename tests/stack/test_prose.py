"""What pages say in words was measured: each figure in a sentence is computed here from the record it comes from.

Tables that are printed from records are held in test_readme.py. A new figure in the prose of these pages belongs into
MEASURED with its record, or into GIVEN if nobody measured it, or its paragraph says that it has no record.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from twell_lab import records, sparsities
from twell_lab.analysis.predict import rates_of
from twell_lab.app import tables
from twell_lab.bench import methods
from twell_lab.bench.comparison import APART, FUSED
from twell_lab.course import sparsity_map
from twell_lab.sparsities import experts, predictors, quantised

ROOT = Path(__file__).resolve().parents[2]
UNIT = r"(?:us|ms|s|TB/s|GB/s|%|times|MB|GB|MiB|GiB|KB|seconds?|of torch's time)(?!\w)"
NUMBER = r"\d[\d,.]*\d|\d"
FIGURE = re.compile(rf"(?<![\w.])(?:{NUMBER})(?:(?:,? (?:to|and|or) |, | against )(?:{NUMBER}))*[ -]?{UNIT}")
PRINTED = re.compile(r'<!-- python -c ".*?-->\n(?:\|[^\n]*\n)*|```.*?```', re.S)
DENSE = "dense eager"
HOST, DRAWN = "host-time-202611{}Z.json", {"workload": "independent, lognormal", "kind": "inference"}


def rows(name: str, **wanted: object) -> list[dict]:
    """Rows of a record that have these values, in the record's order."""
    found = json.loads((ROOT / "data" / "records" / name).read_text())["rows"]
    return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]


def row(name: str, **wanted: object) -> dict:
    (found,) = rows(name, **wanted)
    return found


def returned(day: str, path: str) -> float:
    """Microseconds until a call of 16 tokens returns."""
    return 1e3 * row(HOST.format(day), path=path, tokens=16, workload="forward")["ms"]


def in_a_row(path: str, few: int) -> list[float]:
    """Microseconds of the host for calls one after another, for up to so many tokens."""
    found = [each for each in rows("inference-20261123T052831Z.json", path=path, **DRAWN) if each["tokens"] <= few]
    return sorted(each["host_us"] for each in found if each["nnz"] < 33)


def compiled(name: str, path: str, tokens: int) -> float:
    found = rows(name, path=f"{path} compiled", tokens=tokens, **DRAWN)
    return next(1e3 * each["wall_ms"] for each in found if 25 < each["nnz"] < 33)


def slower_compiled(name: str) -> list[float]:
    counts = (1, 16, 64, 256, 2048)
    return [compiled(name, "planned", tokens) / compiled(name, "dense", tokens) for tokens in counts]


def both_ways() -> list[float]:
    found = rows(HOST.format("23T091823"), workload="forward and backward")
    times = [1e3 * each["ms"] for each in found if each["tokens"] <= 2048 and each["path"] in ("dense eager", "twell")]
    return [min(times), max(times)]


def training_on_the_host(name: str) -> list[float]:
    """The least and the most times as long as dense that the host takes for a forward and a backward pass."""
    found = [rows(name, workload="forward and backward", path=path) for path in ("twell", DENSE)]
    times = sorted(ours["ms"] / dense["ms"] for ours, dense in zip(*found, strict=True))
    return [times[0], times[-1]]


def dense_training_on_the_host(name: str) -> list[float]:
    """The least and the most times as long as dense that the path "dense" takes up to 2,048 tokens, and with 16,384."""
    of = {"workload": "forward and backward"}
    times = [
        row(name, path="dense", tokens=n, **of)["ms"] / row(name, path=DENSE, tokens=n, **of)["ms"]
        for n in (1, 16, 256, 2048, 16384)
    ]
    return [min(times[:-1]), max(times[:-1]), times[-1]]


def both_records() -> list[float]:
    (low, high, many), (less, more, now) = (
        dense_training_on_the_host(HOST.format(day)) for day in ("26T232453", "27T053703")
    )
    return [low, high, less, more, many, now]


def many_tokens() -> list[float]:
    """Microseconds of the host for 131,072 tokens: planned and dense, before and since passes are one recording."""
    return [
        next(each["host_us"] for each in rows(name, path=path, tokens=131072, **DRAWN) if 25 < each["nnz"] < 33)
        for name in ("inference-20261126T192855Z.json", "inference-20261127T030555Z.json")
        for path in ("planned", DENSE)
    ]


def hot_cold_on_the_host() -> list[float]:
    found = [row(HOST.format("26T225901"), workload="forward", tokens=16384, path=p) for p in ("hot_cold 512", DENSE)]
    return [1e3 * each["ms"] for each in found]


def decoding(path: str) -> float:
    return row("model-20261123T021307Z.json", workload="Llama, decode step, batch 1", path=path)["wall_ms"]


def on_two_gpus() -> list[float]:
    step = lambda path: row("two-gpus-20261121T173536Z.json", path=path)["ms"]  # noqa: E731
    runs = ("2 GPUs, ddp", "2 GPUs, fsdp", "1 GPU")
    return [step(f"{run}, {kernels}") for run in runs for kernels in ("auto", "dense")]


def swept() -> list[float]:
    """Percent of zeros, and percent by which two seeds' losses are above those without L1; then for stronger L1."""
    runs = {each["label"]: each for each in rows("sweep-20261121T145100Z.json")}
    bits = lambda label: runs[label]["validation_bits_per_byte"]  # noqa: E731
    found = []
    for label in ("L1 0.0001", "L1 0.0002"):
        pairs = ((label, "lr 0.0012"), (f"{label}, seed 1", "seed 1"))
        found += [100 * runs[label]["zeros"], *(100 * (bits(ours) / bits(dense) - 1) for ours, dense in pairs)]
    return found


def line_of_calls(day: str) -> Callable[[], list[float]]:
    return lambda: [returned(day, "dense eager"), returned(day, "twell")]


def lost_row() -> float:
    """Microseconds more for each row of a training step that does not fit the compact form: 1% of 16,384 tokens."""
    name = "training-20261126T021907Z.json"
    works = ("overflow: 1% of rows with a tile of 200", "heavy rows: 0")
    some, none = (row(name, workload=work, path="forced twell")["ms"] for work in works)
    return 1e3 * (some - none) / 164


def comparison() -> str:
    """The file of the comparison that the tables beside the words are printed from."""
    found = records.newest(records.load_all(), "comparison")
    return f"comparison-{re.sub('[-:]', '', found.date)}.json"


def two_four(path: str) -> dict:
    return row(comparison(), pattern="2:4", path=path)


def unpadded() -> list[float]:
    """MB of x; milliseconds for what gathering and putting back a quarter of the tokens move, at 3.0 TB/s; and those of
    one layer beyond a quarter of the dense layer's."""
    found = rows(comparison(), kind="padding", layers=1)
    removed = [each for each in found if each["path"] == "padding removed"]
    (took,) = (each["ms"] for each in removed if each["real"] * 4 == each["tokens"])
    dense = [each["ms"] for each in found if each["path"] == DENSE]
    whole, share = 2.0 * found[0]["tokens"] * found[0]["d_model"], 0.25
    return [whole / 1e6, 1e3 * whole * (1 + 4 * share) / 3.0e12, took - share * sum(dense) / len(dense)]


def newest(name: str) -> str:
    return max(path.name for path in (ROOT / "data" / "records").glob(f"{name}-2*.json"))


H100 = rates_of("H100 SXM")
SLOWEST, WEIGHTS = 3.0e12, 2 * 3 * 2048 * 5632  # bytes a second that floors assume; those of a layer's weights


def share_of_layers() -> list[float]:
    """Percent of the dense model's time that its layers take, and what it would gain if they took none."""
    every = sorted(path.name for path in (ROOT / "data" / "records").glob("model-paths-2*.json"))
    wholes = (  # of the newest record that came as far
        row["ms"]
        for name in reversed(every)
        for row in rows(name, path=DENSE, tokens=131072)
        if row["workload"].startswith("drawn Llama, ")
    )
    whole = next(wholes)
    alone = next(
        row["ms"] for row in rows(newest("inference"), path=DENSE, tokens=131072, **DRAWN) if 25 < row["nnz"] < 33
    )
    return [100 * 38 * alone / whole, whole / (whole - 38 * alone)]


def longer(path: str, about: str = "drawn Llama") -> float:
    """Microseconds by which a layer takes longer than a dense one, of a step of decoding as a CUDA graph."""
    of = {"workload": f"{about}, decode step, batch 1"}
    ours, dense = (row(newest("model-paths"), path=f"{each} (graph)", **of)["ms"] for each in (path, DENSE))
    return 1e3 * (ours - dense) / 38


def few_bits(path: str, tokens: int) -> float:
    """Milliseconds of one of the gate's products."""
    return row(comparison(), kind="few bits", tokens=tokens, path=f"part: x Wg^T{path}")["ms"]


def two_four_layer() -> list[float]:
    more, held = longer("forced two_four", "drawn Llama with 2:4 weights"), WEIGHTS * (0.5 + 1 / 16)
    alone = rows(newest("inference"), path=f"{DENSE} (graph)", tokens=1, d_ff=5632, **DRAWN)
    dense = next(1e3 * each["ms"] for each in alone if each["gated"] and 25 < each["nnz"] < 33)
    return [more, more + dense, held / 1e6, 1e6 * held / SLOWEST]


SEARCHED = "2:4 (cuSPARSELt, searched, called at once)"


def algorithms() -> list[float]:
    return [two_four(DENSE)["ms"] / two_four(path)["ms"] for path in (SEARCHED, FUSED)]


def turned_apart() -> list[float]:
    """Milliseconds of the 2:4 product with y turned as it is stored, and apart; microseconds between them, and those
    that reading and writing y once more take at 3.0 TB/s; ms of what is not turned, and of what was searched for."""
    at_once, apart = two_four(FUSED)["ms"], two_four(APART)["ms"]
    others = [two_four(path)["ms"] for path in ("2:4 (torch: cuSPARSELt)", SEARCHED)]
    return [at_once, apart, 1e3 * (apart - at_once), 1e6 * 2 * 2 * 4096**2 / 3.0e12, *others]


def experts_layer() -> list[float]:
    size, groups, taken = experts.AsExperts.sizes_of(5632)
    assert 4 * taken == groups  # a quarter
    moved = 2 * (5632 + 2 * taken * size) * 2048
    return [longer("forced experts (lossy)"), moved / 1e6, 1e6 * moved / SLOWEST]


def small_layer() -> list[float]:
    """MB of the weights of a layer of the small trained model, and microseconds of these."""
    one = next(row for row in rows(newest("model-paths")) if row["workload"].startswith("trained small model"))
    held = 2 * (3 if one["gated"] else 2) * one["d_model"] * one["d_ff"]
    return [held / 1e6, 1e6 * held / SLOWEST]


def wide() -> list[float]:
    """Percent of the median that the middle half of the samples is wide at most: of plain calls, and of replays."""
    of = [row for row in rows(newest("model-paths")) if row["workload"].startswith("drawn")]
    share = [(row["path"].endswith("(graph)"), 100 * row["wall_spread"] / row["wall_ms"]) for row in of]
    return [max(each for graph, each in share if graph is wanted) for wanted in (False, True)]


def wide_sizes() -> list[float]:
    """As `wide`, of the drawn model of 2B: the least and the most of plain calls that wait for the host, and the most of
    replays and of many sequences."""
    of = rows("bench-model-20261127T055115Z.json")
    calm = lambda row: row["path"].endswith("(graph)") or "64 x" in row["workload"]  # noqa: E731
    share = [(calm(row), 100 * row["wall_spread"] / row["wall_ms"]) for row in of]
    plain, still = ([each for one, each in share if one is wanted] for wanted in (False, True))
    return [min(plain), max(plain), max(still)]


def wide_on_a_cpu() -> dict[str, dict]:
    """The steps of decoding of the shipped checkpoint, with the LM head, by path."""
    found = rows("bench-model-20261127T062854Z.json", kind="model_decode", head=True)
    return {each["path"]: each for each in found}


def looped(name: str) -> list[dict]:
    """The loop over 64 experts, and their product as groups."""
    return [row(name, workload="64 experts, 2 a token", path=path) for path in (DENSE, "grouped")]


def many_experts() -> list[float]:
    (loop, grouped), (before, then) = looped(comparison()), looped("comparison-20261123T155948Z.json")
    times = [loop["ms"], loop["spread"], before["ms"], before["spread"], grouped["ms"], before["ms"] / then["ms"]]
    return [*times, min(loop["samples"]), min(loop["samples"]) / grouped["ms"]]


def predicted_layer() -> list[float]:
    rank, neurons = predictors.Predicted.sizes_of(5632, 2048)
    moved = 2 * (3 * 3 * neurons * 2048 + rank * (2048 + 5632))
    return [longer("forced predicted (lossy)"), moved / 1e6, 1e6 * moved / SLOWEST]


def packed_in_each_call() -> list[float]:
    """Of 16,384 tokens: ms of h's bytes and of those that are kept of it, and ms that packing takes."""
    took = rows(newest("experiments"), path="compress", tokens=16384)[0]
    dense = 2 * took["tokens"] * took["d_ff"]
    return [1e3 * dense * (1 + 1 / 2 + 1 / 16) / SLOWEST, took["ms"]]


def dropped() -> list[float]:
    """Of 2:4 dropout's product at all numbers of tokens, alone and packed: the least and most times as fast as dense."""
    notes = json.loads((ROOT / "data" / "records" / newest("experiments")).read_text())["notes"]["dropout"]
    said = [each for each in notes.values() if "product_x" in each]
    assert not any(each["loss_differs"] or each["pays"] for each in said)
    times = ([each[key] for each in said] for key in ("product_x", "with_compress_x"))
    return [end for each in times for end in (min(each), max(each))]


def found_tiles() -> list[float]:
    """MB of the widest activations, ms of reading them once, and ms of their dense product."""
    dense = max(rows(comparison(), kind="activations", path=DENSE), key=lambda row: row["tokens"] * row["d_ff"])
    moved = 2 * dense["tokens"] * dense["d_ff"]
    return [moved / 1e6, 1e3 * moved / SLOWEST, dense["ms"]]


def own_experts() -> list[float]:
    """How many times as fast at least and at most; GB copied, and ms of that; ms of the slowest."""
    of = {"kind": "map", "tokens": 16384}
    ours = rows(comparison(), path=methods.GROUPED, **of)
    dense = {row["share"]: row["ms"] for row in rows(comparison(), path=DENSE, **of)}
    times = [dense[row["share"]] / row["ms"] for row in ours]
    copied = 7 * 2 * 16384 * experts.AsExperts.sizes_of(5632)[2] * 2048
    return [min(times), max(times), copied / 1e9, 1e3 * copied / SLOWEST, max(row["ms"] for row in ours)]


def scaled_apart() -> list[float]:
    """GB of int32 and float32 sums, written and read; ms of that; and ms that are spared."""
    moved = 16 * 16384 * 5632
    spared = few_bits(" in INT8, scaled apart", 16384) - few_bits(" in INT8, scaled within", 16384)
    return [moved / 1e9, 1e3 * moved / SLOWEST, spared]


def from_a_bitmap() -> list[float]:
    """MB held, and dense; times as fast as dense fused; MB moved apart, ms of that; and ms that it takes longer."""
    counted, places = quantised.traffic(1, 2048, 5632, density=0.5), 2048 * 5632
    held, apart = places * (1 + 1 / 8), 25 * places
    slower = few_bits(", Wg half zeros, expanded from a bitmap", 1) - few_bits("", 1)
    fused = counted["dense"] / counted["bitmap, fused"]
    return [held / 1e6, 2 * places / 1e6, fused, 25, apart / 1e6, 1e3 * apart / SLOWEST, slower]


def without_launches() -> list[float]:
    """How many times as fast one token is as a CUDA graph and compiled, by the newest record of layers."""
    found = [
        each for each in rows(newest("inference"), tokens=1, **DRAWN) if 25 < each["nnz"] < 33 and each["d_ff"] == 5632
    ]
    at = {each["path"]: each for each in found if each["gated"]}
    replayed = next(path for path in ("planned for graphs (graph)", "planned (graph)") if path in at)
    ways = (("dense eager (graph)", replayed, "ms"), ("dense compiled", "planned compiled", "wall_ms"))
    return [at[dense][clock] / at[ours][clock] for dense, ours, clock in ways]


MEASURED: list[tuple[str, str, Callable[[], list[float]]]] = [
    (
        "docs/calls.md",
        "took the host {:.2f} to {:.2f} times as long as the dense layer's",
        lambda: training_on_the_host(HOST.format("26T225901")),
    ),
    ("docs/calls.md", "is not made: {:.2f} to {:.2f} times", lambda: training_on_the_host(HOST.format("26T232453"))),
    (
        "docs/calls.md",
        "took {:.2f} to {:.2f} times as long as for the dense layer up to 2,048 tokens in that record, and takes {:.2f} to "
        "{:.2f} (`host-time-20261127T053703Z.json`). With 16,384 it was {:.2f} and is {:.2f}",
        both_records,
    ),
    (
        "docs/calls.md",
        "took the host {:.0f} us (`inference-20261126T192855Z.json`; dense {:.0f}) and take it {:.0f} "
        "(`inference-20261127T030555Z.json`; dense {:.0f})",
        many_tokens,
    ),
    ("docs/calls.md", "Recorded: {:.0f} against {:.0f} for the dense layer", hot_cold_on_the_host),
    (
        "README.md",
        "with 1 token it is {:.2f} times where a CUDA graph launches all of them as one, and {:.2f} times with both layers "
        "under `torch.compile`",
        without_launches,
    ),
    *(
        ("docs/calls.md", f"| {{:.0f}} | {{:.0f}} | `{HOST.format(day)}` |", line_of_calls(day))
        for day in ("22T114203", "22T134932", "22T232407", "23T021122", "23T091823")
    ),
    ("docs/calls.md", "take {:.0f} to {:.0f} us up to 2,048 tokens, dense or sparse", both_ways),
    (
        "docs/calls.md",
        "TwELL takes {:.0f} to {:.0f}, dense {:.0f} to {:.0f}, for up to 64 tokens (`inference-20261123T052831Z.json`)",
        lambda: [
            end for path in ("forced twell", "dense eager") for end in (in_a_row(path, 64)[0], in_a_row(path, 64)[-1])
        ],
    ),
    (
        "docs/calls.md",
        "the layer that took {:.0f} where the dense one took {:.0f} lost in a Llama",
        lambda: [in_a_row("forced twell", 1)[0], in_a_row("dense eager", 1)[0]],
    ),
    (
        "docs/calls.md",
        "(`model-20261123T021307Z.json`: decoding {:.1f} ms against {:.1f})",
        lambda: [decoding("planned"), decoding("dense eager")],
    ),
    (
        "docs/calls.md",
        "a layer alone took {:.0f} at one token where the compiled dense layer took {:.0f}",
        lambda: [compiled("inference-20261123T022028Z.json", path, 1) for path in ("planned", "dense")],
    ),
    (
        "docs/calls.md",
        "{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f} (`inference-20261123T052831Z.json`; before "
        "{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f})",
        lambda: [x for at in ("052831", "022028") for x in slower_compiled(f"inference-20261123T{at}Z.json")],
    ),
    ("docs/measured.md", "the dense product takes {:.1f} ms whatever the values are", lambda: [two_four(DENSE)["ms"]]),
    (
        "docs/measured.md",
        "by counted bytes (`two_four.bound`) this product can be {:.2f} times as fast at most",
        lambda: [sparsity_map.row_products(4096, d_in=4096, d_out=4096)["y = x W^T"]],
    ),
    (
        "docs/measured.md",
        "y would be read and written once more, and this product {:.2f} times as fast at most",
        lambda: [
            sparsities.two_four.bound(sparsities.two_four.linear_products(4096, 4096, 4096)[:1], H100, fused=False)
        ],
    ),
    (
        "docs/measured.md",
        "a plain call takes {:.1f} ms, most of it on the host",
        lambda: [two_four("2:4 (torch: cuSPARSELt, searched)")["wall_ms"]],
    ),
    (
        "docs/measured.md",
        "With a quarter of {:.0f} MB real that is {:.2f} ms at 3.0 TB/s, of the {:.2f} ms that the layer takes beyond a "
        "quarter of the dense one's time",
        unpadded,
    ),
    (
        "docs/measured.md",
        "of 64 x 2,048 tokens the 38 layers are {:.0f}% of the dense model's time, so that with layers that take none it "
        "would be {:.2f} times as fast",
        share_of_layers,
    ),
    (
        "docs/measured.md",
        "A dense layer's weights are {:.0f} MB, {:.0f} us at 3.0 TB/s",
        lambda: [WEIGHTS / 1e6, 1e6 * WEIGHTS / SLOWEST],
    ),
    (
        "docs/measured.md",
        "`two_four` takes {:.0f} us longer than a dense layer, {:.0f} in all. Its weights are {:.0f} MB, {:.0f} us,",
        two_four_layer,
    ),
    (
        "docs/measured.md",
        "is {:.2f} times as fast as dense in the product of 4,096 (below), where this one is {:.2f} times",
        algorithms,
    ),
    (
        "docs/measured.md",
        "{:.3f} ms turned as it is stored, {:.3f} ms turned apart. Of the {:.0f} us between them {:.0f} are what y's bytes "
        "take at 3.0 TB/s; torch's copy of a transpose does not reach that. Unasked, cuSPARSELt takes an algorithm that pays "
        "for turning: its product W B, of which nothing is turned (the first line), takes {:.3f} ms, and a searched y = x "
        "W^T takes {:.3f}",
        turned_apart,
    ),
    (
        "docs/measured.md",
        "`experts` takes {:.0f} us longer. The gate, and the quarter of up and down that a token's groups are, are {:.0f} "
        "MB, {:.0f} us",
        experts_layer,
    ),
    ("docs/measured.md", "The layers of the small trained model have {:.1f} MB of weights, {:.1f} us", small_layer),
    ("docs/measured.md", "up to {:.0f}% of the median wide, that of the replays up to {:.1f}%", wide),
    ("docs/measured.md", "if that is more than {:.0f} MiB", lambda: [tables.LITTLE]),
    (
        "docs/measured.md",
        "decodes {:.2f} times as fast with its one layer (384 x 4,096, of which {:.0f} neurons fire)",
        lambda: [(ours := wide_on_a_cpu()["planned"])["dense_wall_ms"] / ours["wall_ms"], ours["nnz"]],
    ),
    (
        "docs/measured.md",
        "is {:.0f}% to {:.0f}% of the median wide, more than most of their differences; that of 64 sequences and of "
        "replays at most {:.1f}%",
        wide_sizes,
    ),
    (
        "docs/measured.md",
        "{:.1f} ms in this record, with quartiles {:.1f} ms apart, {:.1f} ms and {:.1f} in "
        "`comparison-20261123T155948Z.json`, where grouped, {:.2f} ms here, was {:.2f} times as fast. By its fastest sample "
        "here, {:.1f} ms, it is {:.2f} times",
        many_experts,
    ),
    (
        "docs/measured.md",
        "takes as long as dense, {:.1f} us more",
        lambda: [longer("forced blocks", "drawn Llama with empty blocks")],
    ),
    (
        "docs/measured.md",
        "read half of the bytes, in {:.1f} us less and {:.1f} us more",
        lambda: [-longer("forced int8 (lossy)"), longer("forced fp8 (lossy)")],
    ),
    ("docs/measured.md", "`predicted` takes {:.0f} us longer", lambda: predicted_layer()[:1]),
    ("docs/measured.md", "of its own, {:.0f} MB in all, {:.0f} us;", lambda: predicted_layer()[1:]),
    (
        "docs/measured.md",
        "of the widest layer {:.0f} MB, {:.2f} ms at 3.0 TB/s, and its dense product takes {:.2f} ms",
        found_tiles,
    ),
    (
        "docs/measured.md",
        "{:.2f} to {:.2f} times as fast as dense. A quarter of up and down is left, but a token's row of x and its results "
        "are copied for each of its groups, {:.1f} GB, which is {:.1f} ms at 3.0 TB/s of the {:.1f} ms that it takes",
        own_experts,
    ),
    (
        "docs/measured.md",
        "are {:.2f} ms at 3.0 TB/s with 16,384 tokens, of the {:.1f} ms that it takes",
        packed_in_each_call,
    ),
    (
        "docs/measured.md",
        "is only {:.2f} to {:.2f} times as fast as the dense one, and with packing {:.2f} to {:.2f} times",
        dropped,
    ),
    (
        "docs/measured.md",
        "as int32 and as float32, {:.2f} GB, {:.2f} ms at 3.0 TB/s, of the {:.2f} ms by which",
        scaled_apart,
    ),
    (
        "docs/measured.md",
        "half of the values and a bit for each place are {:.0f} MB, dense they are {:.0f}. Expanded on the way into the "
        "product, with one token, that would be {:.1f} times as fast. Expanded before it, by torch's operations, each place "
        "takes some {:.0f} bytes (zeros, its bit as a byte and as a boolean, a running sum of those as int64, its value), "
        "{:.0f} MB, {:.2f} ms of the {:.2f} ms that it takes longer",
        from_a_bitmap,
    ),
    (
        "docs/status.md",
        "with one of a hundred {:.0f} us more for each, `training-20261126T021907Z.json`",
        lambda: [lost_row()],
    ),
    (
        "docs/status.md",
        "takes {:.0f} ms instead of {:.0f} ms with DDP, {:.0f} instead of {:.0f} with FSDP2, and {:.0f} instead of "
        "{:.0f} on one of them (`two-gpus-20261121T173536Z.json`",
        on_two_gpus,
    ),
    (
        "docs/status.md",
        "{:.1f}% zeros raised the validation loss by {:.1f}% and {:.1f}% with two seeds, and {:.1f}% zeros by {:.1f}% "
        "and {:.1f}% (`sweep-20261121T145100Z.json`)",
        swept,
    ),
]
# What nobody here measured: shapes, rates that floors assume, rules of plans, what others report.
GIVEN = {
    "README.md": (),
    "docs/measured.md": (
        "never have more than 99.2% zeros",
        "PIT up to 88.7, 5.8, 17.5 and 5.7 times as fast as",
        "2:4 about 1.6 times in practice; blocks 3.4 times at 90% in a layer",
        "pay from 99% on",
        "1.4 GB at 99%",
        "of which 90% of the blocks of 32 x 32 are empty",
        "and its change with a 95% interval",
    ),
    "docs/status.md": (
        "another path was measured to be 3% faster than the layer was before (5% where",
        "is predicted to be 10% faster",
        "(57 million parameters, 39 MB of novels)",
    ),
    "docs/calls.md": (),
}


# In the notebooks' own words, where cells print what is measured: shapes and zeros are theirs to choose, times are not.
TIME = re.compile(rf"(?<![\w.])(?:{NUMBER})(?: (?:to|and|or) (?:{NUMBER}))*[ -]?(?:us|ms|[TG]B/s|times)(?!\w)")
GIVEN_IN_NOTEBOOKS = {
    "04-train-with-l1.ipynb": ("up to 500 times larger", "trained 19 times on English novels"),
    "08-first-kernels.ipynb": ("at the L2's 7.4 TB/s 0.53 ms",),  # a floor
    "11-train-with-the-kernels.ipynb": ("added in float32 200 times",),
    "12-capstone.ipynb": ("at most 1.5 times the floor's sectors", "at most 1.25 times the time of `down_v2`"),
    "glossary.ipynb": ("at up to 7.4 TB/s", "at 3.35 TB/s by its datasheet, of which 3.0 TB/s are reached"),
}


def words(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def said(text: str, values: Callable[[], list[float]]) -> str:
    return text.format(*values())


@pytest.mark.parametrize(
    ("page", "text", "values"), MEASURED, ids=lambda value: value[:30] if isinstance(value, str) else ""
)
def test_what_is_said_is_what_was_recorded(page, text, values):
    assert said(text, values) in words(page), f"{page} does not say: {said(text, values)}"


@pytest.mark.parametrize("page", GIVEN)
def test_every_figure_comes_from_somewhere(page):
    text = PRINTED.sub(" ", (ROOT / page).read_text(encoding="utf-8"))
    sections = [" ".join(section.split()) for section in re.split(r"\n(?=#)", text)]
    known = [*GIVEN[page], *(said(text, values) for at, text, values in MEASURED if at == page)]
    for section in sections:
        for phrase in known:
            section = section.replace(phrase, " ")
        if not re.search(r"(?:in a|runs?) (?:run )?without (?:a record|one)", section):
            assert not FIGURE.findall(section), f"{page} does not say where this comes from: {FIGURE.findall(section)}"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")))
def test_no_notebook_says_a_time_that_its_cells_do_not_print(name):
    cells = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = " ".join(re.sub(r"<details.*?</details>|```.*?```", " ", text, flags=re.S).split())
    for phrase in GIVEN_IN_NOTEBOOKS.get(name, ()):
        assert phrase in text, f"{name} does not say {phrase!r} any more"
        text = text.replace(phrase, " ")
    assert not TIME.findall(text), f"{name} does not say where this comes from: {TIME.findall(text)}"
