"""What the notebook on choosing a path computes: methods that skip silent neurons, or tokens, on the same layers and
clocks, and which of them is fastest where.

Each method is held against the dense layer before it is timed, unless it is lossy or another layer, which its name
says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ... import core, records
from ...analysis import predict as predicting
from ...analysis.costs import by_choice
from ...bench import comparison, methods
from ...bench import losses as chosen_neurons
from ...bench import rows as bench_rows
from ...bench.comparison import SCATTERED, TALL, Shape, quantile
from ...bench.methods import DENSE, HEIGHT, INEXACT, PACKED, PREDICTED, RANK, SHARES, SPLIT, TILES, sizes_for
from ...layers.choice import Choice
from ...layers.paths.twell import STEP
from ...models.tiny import LanguageModel
from ...ops import clock
from ...ops.clock import dtype_for
from ...sparsities import microtiles, neuron_experts
from ...sparsities.core_neurons import core_neurons
from ...sparsities.few_neurons import remove
from ...sparsities.predictors import Predictors
from ...training.text import source
from ..recorded import LOGNORMAL, newest, sourced

# ---- a small model, and what fires in it ----


@dataclass(frozen=True)
class Study:
    """A small trained model. windows: int64 [windows, context], held-out text; seen: of the text it was trained on.
    fires: bool [tokens, d_ff] of each layer, on some of the held-out text."""

    model: LanguageModel
    windows: Tensor
    seen: Tensor
    fires: list[Tensor]


@torch.no_grad()
def study(name: str = "small", windows: int = 16) -> Study:
    """One of data/checkpoints, on Python source."""
    model = LanguageModel.load(core.data_dir() / "checkpoints" / name)
    context = min(128, model.config.context)
    seen, held_out = (
        source.spread_windows(part.tokens, count, context)[:, :-1].long()
        for part, count in zip(source.standard_library().split(), (64, windows))
    )
    fires: list[Tensor] = []
    hooks = [
        layer.mlp.gate_proj.register_forward_hook(lambda *given: fires.append((given[2] > 0).flatten(0, 1)))
        for layer in model.layers
    ]
    try:
        model(held_out[:16])
    finally:
        for hook in hooks:
            hook.remove()
    return Study(model, held_out, seen, fires)


SKIPPED, FOR_NOTHING, NEEDED, MISSED = range(4)


def works(fires: Tensor, tokens: int = 64, neurons: int = 64) -> dict[str, Tensor]:
    """Return what each method computes of a corner of `fires` [tokens, d_ff], the neurons that fire most first: int64
    [tokens, neurons] of SKIPPED, FOR_NOTHING, NEEDED and MISSED, by the method's name."""
    order = fires.sum(0).argsort(descending=True, stable=True)
    corner = fires[:tokens, order[: 6 * neurons : 6]]  # every sixth, from the busiest to those that fire rarely
    tokens, neurons = corner.shape
    stripes = corner.view(-1, HEIGHT, neurons).any(1).repeat_interleave(HEIGHT, 0)
    groups = corner.view(tokens, -1, 16).any(2).repeat_interleave(16, 1)
    first = lambda count: (torch.arange(neurons) < count).expand(tokens, neurons)
    computed = {
        DENSE: torch.ones_like(corner),
        "packed, each entry alone": corner,
        "hot and cold": corner | first(6),
        "micro-tiles of 32 tokens": stripes,
        "experts of 16 neurons": groups,
        "the same 16 for all (lossy)": first(16),
    }
    kinds = {}
    for name, done in computed.items():
        wanted = torch.where(corner, NEEDED, FOR_NOTHING)
        kinds[name] = torch.where(done, wanted, torch.where(corner, MISSED, SKIPPED))
    return kinds


# ---- micro-tiles ----


def occupied(density: float, height: int) -> float:
    """The share of a stripe's columns that hold anything, if each of `height` values is there independently."""
    return 1 - (1 - density) ** height


def occupied_rows(subject: Study, heights: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)) -> list[dict]:
    """{layer, density, height, measured, expected}: which share of the columns of stripes is occupied in the model, and
    if every neuron fired equally often and by itself."""
    made = []
    for number, fires in enumerate(subject.fires):
        density = float(fires.double().mean())
        for height in heights:
            measured = microtiles.find_microtiles(fires.half(), height).occupied
            shared = {"layer": number, "density": density, "height": height}
            made.append({**shared, "measured": measured, "expected": occupied(density, height)})
    return made


def occupied_sentence(rows: list[dict], layer: int = 1, height: int = HEIGHT) -> str:
    """Return what one layer has in stripes of this height, and how many layers have fewer than if neurons fired at
    random."""
    mine = [row for row in rows if row["height"] == height]
    share = next(row["measured"] for row in mine if row["layer"] == layer)
    fewer = sum(row["measured"] < row["expected"] for row in mine)
    return f"{share:.0%}, fewer in {fewer} of {len(mine)} layers"


def products_here(device: str, sparsities: Sequence[float] = (0.5, 0.75, 0.9, 0.95, 0.99)) -> list[dict]:
    """Rows of comparison.product_rows for micro-tiles, on scattered zeros and on tiles of 32 x 1, with `where`."""
    shape = Shape(dtype=dtype_for(device)) if device == "cuda" else Shape(512, 1024, 256, torch.float32, "cpu", 0.2)
    tiled = [method for method in comparison.METHODS if method.name == TILES]
    cases = [(pattern, sparsity) for pattern in (SCATTERED, TALL) for sparsity in sparsities]
    made = [row for case in cases for row in comparison.product_rows(*case, shape, tiled)]
    return [row | {"where": _here(device)} for row in made]


def products_sentence(rows: list[dict]) -> str:
    """Between which two shares of scattered zeros that were timed micro-tiles begin to win."""
    mine = [row for row in rows if row["path"] == TILES and row["pattern"] == SCATTERED]
    wins = [(row["density"], row["x_dense"] > 1) for row in sorted(mine, key=lambda row: -row["density"])]
    for (more, before), (less, after) in pairwise(wins):
        if after and not before:
            return f"scattered zeros begin to win between {1 - more:.0%} and {1 - less:.0%}"
    return f"scattered zeros win {'everywhere' if all(won for _, won in wins) else 'nowhere'}"


# ---- padding ----


@torch.no_grad()
def padding_rows(device: str, shares: Sequence[float] = (1.0, 0.75, 0.5, 0.25)) -> list[dict]:
    """{real (share of the rows), path, ms, where}: a dense layer on a padded batch, on its real rows, and on as many
    rows that were never apart."""
    timed = [row for share in shares for row in methods.padding_rows(share, 1, sizes_for(device))]
    made = [{"real": row["real"] / row["tokens"], "ms": row["ms"], "path": row["path"]} for row in timed]
    padded = {bench_rows.DENSE: "padded"}
    return [row | {"path": padded.get(row["path"], row["path"]), "where": _here(device)} for row in made]


def padding_sentence(rows: list[dict]) -> str:
    """Return how much faster the fewest real rows are without the padding."""
    least = min(row["real"] for row in rows)
    took = {row["path"]: row["ms"] for row in rows if row["real"] == least}
    return f"Without padding, {least:.0%} real: {took['padded'] / took[methods.REMOVED]:.1f} times."


def proportion_sentence(recorded: Iterable[dict]) -> str:
    """Return how far recorded layers without padding are at most from dense's time in proportion to the real tokens,
    and how far as many tokens alone are there, in two lines. recorded: of `recorded("comparison")`; "" without such
    rows."""
    rows = [row for row in recorded if row["kind"] == "padding"]
    if not rows:
        return ""
    said = []
    for each in methods.proportions(rows):
        own = "" if each.own is None else f" (as many tokens alone {each.own:+.0%})"
        said.append(f"{each.layers} layer{'s' * (each.layers > 1)} {each.beside_dense:+.0%}{own}")
    return f"{rows[0]['where']},<br>beside proportion: {', '.join(said)}"


# ---- hot and cold ----


def dearer(rows: Iterable[dict], tokens: int = 16384, most: float = 1 / 64) -> float | None:
    """Return how many times as much a firing neuron costs a token when it is packed as any neuron when it is dense.

    rows: of `recorded_map`. Packed, from the fewest to the most that fire, up to the share `most`; dense, two thirds of
    the layer, since the gate is computed either way. None where fewer than two were recorded."""
    here = sorted(
        (row for row in rows if not row.get("whole") and row["tokens"] == tokens and row["share"] <= most),
        key=lambda row: row["share"],
    )
    packed, dense = ([row for row in here if row["method"] == method] for method in (PACKED, DENSE))
    if len(packed) < 2 or not dense:
        return None
    few, many = packed[0], packed[-1]
    return (many["ms"] - few["ms"]) / (many["share"] - few["share"]) / (2 / 3 * dense[0]["ms"])


def hot_neurons(shares: Tensor, times: float) -> Tensor:
    """The neurons that are cheaper dense, those that fire most first: int64. shares: of the tokens at which each fires.
    times: see `dearer`."""
    order = shares.argsort(descending=True, stable=True)
    return order[shares[order] * times > 1]


@torch.no_grad()
def hot_rows(device: str, recorded: Iterable[dict] = (), share: float = 1 / 64) -> list[dict]:
    """{hot, d_ff, x_dense, low, high, where}: a layer in which this share of the neurons fires, by how many of them are
    computed densely, timed here in turns with the dense layer; low to high holds eight in ten turns. And the rows of
    `recorded_map` whose share is within a factor of two, at the most tokens, without low and high."""
    sizes = sizes_for(device)
    layer, x = methods.drawn(share, sizes, sizes.tokens[-1] // 2)
    step = max(1, sizes.d_ff // 8 // STEP) * STEP
    calls: bench_rows.Calls = {DENSE: bench_rows.over(layer, [x])}
    hots = range(0, sizes.d_ff, step)
    for hot in hots:
        swapped = methods.swapped(layer, Choice("hot_cold", hot) if hot else Choice("twell"))
        methods.check_close(f"hot {hot}", swapped(x), layer(x))
        calls[str(hot)] = bench_rows.over(swapped, [x])
    took, _ = bench_rows.clocked(calls, x.device, 1.0, rounds=10)
    shared, made = {"d_ff": sizes.d_ff, "where": _here(device)}, []
    for hot in hots:
        turns = [dense / mine for dense, mine in zip(took[DENSE], took[str(hot)])]
        low, middle, high = (quantile(turns, share) for share in (0.1, 0.5, 0.9))
        made.append({**shared, "hot": hot, "x_dense": middle, "low": low, "high": high})
    near = [row for row in recorded if row["tokens"] == 16384 and share / 2 < row["share"] < 2 * share]
    near = [row for row in near if not row.get("whole")]
    for row in sorted(near, key=lambda row: (row["share"], row["hot"])):
        where = f"{row['where']}: {row['share'] * row['d_ff']:.0f} of {row['d_ff']:,} fire"
        made.append({**{key: row[key] for key in ("hot", "d_ff", "x_dense")}, "where": where})
    return made


def hot_sentence(rows: list[dict]) -> str:
    """Return whether any number of hot neurons is faster than dense here by more than the spread of the times, and
    which."""
    best = max((row for row in rows if "low" in row), key=lambda row: row["low"])
    spread = f"{best['x_dense']:.2f} ({best['low']:.2f} to {best['high']:.2f})"
    if best["low"] <= 1:
        return f"none surely beats dense; the likeliest, {best['hot']} hot: {spread}"
    return f"{best['hot']} hot neurons beat dense: {spread}"


@torch.no_grad()
def grains(fires: Tensor | None = None, sizes: Iterable[int] = (1, 4, 16, 64, 256), hot: int = 0) -> list[dict]:
    """{grain, groups, work, error}: the layer of a drawn workload cut into groups of `grain` neurons that are given the
    tokens for which one of theirs fires (sparsities.neuron_experts.routed_by_firing)."""
    layer, (x, *_) = clock.workload(64, 64, 256, 8, "lognormal", torch.float32, "cpu")
    weights = [each.weight for each in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    made, wanted = [], layer(x)
    for grain in sizes:
        found = neuron_experts.routed_by_firing(x, *weights, hot=hot, grain=grain)
        error = float((found.y - wanted).norm() / wanted.norm())
        made.append({"grain": grain, "groups": len(found.routed), "work": found.work, "error": error})
    return made


# ---- experts ----


@torch.no_grad()
def expert_rows(device: str, counts: Sequence[int] = (4, 8, 16, 32, 64)) -> list[dict]:
    """{experts, routing, way, ms, where}: as many weights in more and smaller experts, two to a token, with tokens
    spread evenly and all to the same two, computed in each way of sparsities.experts."""
    d_model, total, tokens = (2048, 65536, 4096) if device == "cuda" else (128, 4096, 256)
    made, sizes = [], replace(sizes_for(device), d_model=d_model, tokens=(tokens,))
    for count in counts:
        for routing in ("spread", "all to the same two"):
            here = replace(sizes, expert_d_ff=total // count)
            rows = methods.experts_rows(count, here, crowded=routing != "spread")
            shared = {"experts": count, "routing": routing, "where": _here(device)}
            ways = {row["path"]: row["ms"] for row in rows if row["path"] != methods.WHOLE}
            made += [shared | {"way": "loop" if way == bench_rows.DENSE else way, "ms": ms} for way, ms in ways.items()]
    return made


def expert_sentence(rows: list[dict]) -> str:
    """The fastest way with the most experts, for each routing; ways within a twentieth of it count as equal."""
    count, lines = max(row["experts"] for row in rows), []
    for routing in dict.fromkeys(row["routing"] for row in rows):
        took = {row["way"]: row["ms"] for row in rows if (row["routing"], row["experts"]) == (routing, count)}
        quick = [way for way, ms in took.items() if ms <= 1.05 * min(took.values())]
        lines.append(f"{routing}, {' or '.join(quick)}")
    return f"fastest of {count} experts: {'; '.join(lines)}"


# ---- predictors, and one token ----


@torch.no_grad()
def lossy_rows(
    subject: Study,
    found: Predictors,
    recalls: Sequence[float] = (0.5, 0.8, 0.95, 0.99),
    shares: Sequence[float] = (0.1, 0.3, 0.7),
) -> list[dict]:
    """{way, computed (share of the neurons), more (share of the dense loss)}: the model with predicted neurons, and
    with the core neurons of each window's first half; the loss is that of second halves. "what fires" loses nothing."""
    model, windows = subject.model, subject.windows
    dense = float(chosen_neurons.second_halves(model, windows).mean())
    firing = sum(float(each.double().mean()) for each in subject.fires) / len(subject.fires)
    made = [{"way": "what fires: the gate decides", "computed": firing, "more": 0.0}]

    def row(way: str, sparsity: float, at: Callable | None = None) -> None:
        more = float(chosen_neurons.second_halves(model, windows, at).mean()) / dense - 1
        made.append({"way": way, "computed": 1 - sparsity, "more": more})

    try:
        for recall in recalls:
            at = found.at(recall)
            at.apply(model)
            row("predicted for each token", at.sparsity)
            remove(model)
        for share in shares:
            again = lambda prompt, share=share: core_neurons(remove(model), prompt, share).apply(model)
            row("the prompt's core neurons", 1 - share, again)
    finally:
        remove(model)
    return made


def predictor_sentence(found: Predictors) -> str:
    """Return how many neurons are computed for one that fires."""
    table = found.table()
    neurons, firing = (sum(row[key] for row in table) for key in ("neurons", "firing"))
    return f"Guessing, at {found.recall:.0%} recall: {neurons / firing:.0f} neurons computed for each that fires."


def token_bytes(d_model: int, d_ff: int, firing: int, rank: int, chosen: int, size: int) -> tuple[int, int, int]:
    """Bytes of weights that one token needs in a gated layer: dense; packed; and with a predictor of this rank that has
    `chosen` neurons computed. size: bytes of a value."""
    row = d_model * size
    return 3 * d_ff * row, (d_ff + 2 * firing) * row, rank * (d_model + d_ff) * size + 3 * chosen * row


def token_rows(rows: Iterable[dict], device: str) -> list[dict]:
    """{share, method, x_dense, bytes_x, where}: the rows of `map_rows` of one token, packed and with a predictor: times
    as fast as dense as it was timed, and by bytes."""
    sizes, size, made = sizes_for(device), dtype_for(device).itemsize, []
    for row in rows:
        if row["tokens"] == 1 and row["method"] in (PACKED, PREDICTED):
            firing = max(1, round(row["share"] * sizes.d_ff))
            dense, packed, predicted = token_bytes(sizes.d_model, sizes.d_ff, firing, RANK, firing, size)
            made.append(row | {"bytes_x": dense / (packed if row["method"] == PACKED else predicted)})
    return made


# ---- the map ----


@torch.no_grad()
def map_rows(device: str, shares: Sequence[float] = SHARES) -> list[dict]:
    """{method, tokens, share, ms, x_dense, exact, where}: a gated layer at each share of firing neurons and number of
    tokens, by each method. Experts compute the same share of as many weights, and are another layer. The predictor is
    at its best: it chooses no more neurons than fire, and is not trained."""
    sizes, where = sizes_for(device), _here(device)
    made = [_of_map(row | {"where": where}) for share in shares for row in methods.map_rows(share, sizes)]
    for tokens in sizes.tokens:  # who fires is all the same to the dense layer: its times are one, the median
        mine = [row for row in made if row["tokens"] == tokens]
        dense = clock.quartiles([row["ms"] for row in mine if row["method"] == DENSE])[0]
        for row in mine:
            row["ms"] = dense if row["method"] == DENSE else row["ms"]
            row["x_dense"] = dense / row["ms"]
    return made


def recorded_map(device: str = records.TOLD) -> list[dict]:
    """Rows as of `map_rows` from records on a GPU with this in its name, layers of 2048 x 5632 with drawn firing rates:
    of inference, dense, packed, and hot and cold, where one of the latter was timed, each with `hot`; and of the
    comparison all methods (`bench.methods.map_rows`), these rows with `whole`. May be empty."""

    def wanted(row: dict) -> bool:
        return (
            row["kind"] == "inference"
            and (row["d_model"], row["d_ff"], row["workload"]) == (2048, 5632, LOGNORMAL)
            and row["path"].partition(" ")[0] in ("forced", "dense")
            and row["path"].partition(" (")[2] == ""
            and row.get("gated", True)
        )

    made = []
    for row in newest("inference", device, wanted):
        name = row["path"].removeprefix("forced ")
        method = {"twell": PACKED, "dense eager": DENSE}.get(name, SPLIT if name.startswith("hot_cold") else None)
        if method is not None:
            said = {key: row[key] for key in ("tokens", "d_ff", "ms", "x_dense", "where")}
            hot = {PACKED: 0, DENSE: row["d_ff"]}.get(method) if method != SPLIT else int(name.split()[1])
            made.append({**said, "method": method, "share": row["nnz"] / row["d_ff"], "hot": hot, "exact": True})
    beside = {(row["share"], row["tokens"]) for row in made if row["method"] != DENSE}
    made = [row for row in made if (row["share"], row["tokens"]) in beside]
    whole = next((rows for gpu, rows in _whole_maps().items() if device in gpu), [])
    return made + [_of_map(row) | {"whole": True} for row in whole]


def _of_map(row: dict) -> dict:
    """Return a row of `methods.map_rows` as one of `map_rows`: on a CPU, where what else runs only adds to a time, with
    the lower quartile."""
    method = DENSE if row["path"] == bench_rows.DENSE else row["path"]
    ms = quantile(row["samples"], 0.25) if row["device"] == "CPU" else row["ms"]
    said = {key: row[key] for key in ("tokens", "d_ff", "x_dense", "where", "share")}
    return {**said, "ms": ms, "method": method, "exact": method not in INEXACT}


def _whole_maps() -> dict[str, list[dict]]:
    """By GPU the rows of kind "map" of its newest comparison that has any, each with `where`: those of one record,
    since the faster of two runs would not be what a run takes. The GPU that figures tell of (records.TOLD) comes
    first."""
    found: dict[str, list[dict]] = {}
    for record in records.load_all():
        rows = [row for row in sourced(record) if row["kind"] == "map"] if record.name == "comparison" else []
        found |= {gpu: [row for row in rows if row["device"] == gpu] for gpu in {row["device"] for row in rows}}
    return {gpu: found[gpu] for gpu in sorted(found, key=lambda gpu: (records.TOLD not in gpu, gpu))}


def recorded_maps() -> list[dict]:
    """The rows of `recorded_map` of every GPU of which a record has all methods, each with its `gpu`, the one that
    figures tell of (records.TOLD) first; where no record has, those of that one."""
    return [row | {"gpu": gpu} for gpu in _whole_maps() or [records.TOLD] for row in recorded_map(gpu)]


def winners(rows: Iterable[dict], exact: bool = True) -> dict[tuple[float, int], dict]:
    """The fastest method by (share, tokens); dense where none is faster by a twentieth, which may be noise. exact: only
    those that compute the dense layer's result. Shares up to an
    eighth above another count as that one, since what is drawn only comes near what was asked for."""
    best: dict[tuple[float, int], dict] = {}
    first, worth = 0.0, lambda row: row["x_dense"] * (1.05 if row["method"] == DENSE else 1)
    for row in sorted(rows, key=lambda row: row["share"]):
        first = row["share"] if row["share"] > 1.125 * first else first
        at = first, row["tokens"]
        if (row["exact"] or not exact) and (at not in best or worth(row) > worth(best[at])):
            best[at] = row
    return best


def recorded(name: str) -> list[dict]:
    """The rows of the newest record of this name that was made on a GPU (records.newest), each with `where`; [] where
    there is none."""
    named = [record for record in records.load_all() if record.name == name]
    record = records.newest([each for each in named if any(row["device"] != "CPU" for row in each.rows)], name)
    return [row for row in sourced(record) if row["device"] != "CPU"] if record else []


def predicted_sentence(
    recorded: Iterable[dict] = (),
    gpus: Sequence[str] = ("T4", "RTX 4090", "A100 80 GB SXM", "H100 SXM"),
    nnz: float = 29,
    tokens: Sequence[int] = (1, 16384),
) -> str:
    """Return how many times as fast as dense a layer of 2048 x 5632 should be on each GPU's best path, by the cost
    model (analysis.predict); and what was recorded. recorded: of `recorded_map`."""
    said = []
    for gpu in gpus:
        firing, rates = predicting.firing_of(nnz), predicting.rates_of(gpu)
        took = [by_choice(firing, rates, count) for count in tokens]
        times = "/".join(f"{each[Choice(DENSE)] / min(each.values()):.1f}" for each in took)
        said.append(f"{gpu.removesuffix(' SXM').removesuffix(' 80 GB')} {times}")
    best = [
        max(
            (row["x_dense"] for row in recorded if row["tokens"] == count and 0.9 < row["share"] * 5632 / nnz < 1.1),
            default=0,
        )
        for count in tokens
    ]
    held = f"; recorded {'/'.join(f'{each:.1f}' for each in best)}" if all(best) else ""
    return f"Predicted, {'/'.join(f'{count:,}' for count in tokens)} tokens: {', '.join(said)}{held}"


def three_lines(mine: list[dict], found: Predictors, padding: list[dict]) -> list[str]:
    """Return what the notebook found, in three sentences made of its numbers: of the map here, of predictors and
    padding."""
    best = winners(mine)
    won: dict[str, int] = {}
    for row in best.values():
        won[row["method"]] = won.get(row["method"], 0) + 1
    top = max(best.values(), key=lambda row: row["x_dense"])
    said = ", ".join(f"{_short(name)} {won[name]}" for name in sorted(won, key=lambda name: -won[name]))
    at = f"{top['tokens']} token{'s' * (top['tokens'] > 1)}"
    return [
        f"The map here, best of {len(best)} cells: {said}; at most {top['x_dense']:.1f} times, {at}.",
        padding_sentence(padding),
        predictor_sentence(found),
    ]


def _short(method: str) -> str:
    return method.removesuffix(" 32 x 1").removesuffix(" (TwELL)")


def _here(device: str) -> str:
    return f"yours, now, on {clock.device_name(torch.device(device))}"
