"""The exercises: every folded answer passes its check, what is handed out does not, and wrong answers are told."""

import itertools
import statistics
from pathlib import Path

import pytest
import torch

import twell_lab
from tests.course.handed_out import handed_out
from twell_lab import simulator
from twell_lab.course import exercises, packing, puzzles
from twell_lab.course.capstone.cases import STEPS
from twell_lab.course.checks.speed import without_multiplying


def verdict(capsys) -> str:
    return capsys.readouterr().out


def test_every_check_belongs_to_an_exercise_and_back():
    assert sorted(handed_out() | handed_out(kernels=True)) == sorted(exercises.CHECKS)


@pytest.mark.parametrize("name", handed_out())
def test_the_folded_answer_passes_and_what_is_handed_out_does_not(name, capsys):
    given, answer, function = handed_out()[name]
    space = {"torch": torch, "tl": twell_lab, "exercises": exercises, "packing": packing}
    exec(given, space)
    assert verdict(capsys).startswith("Not yet: ")
    exec(answer, space)
    exercises.check(name, space[function])
    assert verdict(capsys).startswith(exercises.RIGHT)


# What is handed out right, and slow, or with a fault: the others are empty.
SLOW = {
    "tile_counts": "the result is right. But with 1024 columns, the loads touch 4,096 sectors",
    "row_counts": "a barrier is missing: thread 32 of block 0 writes part[1] and thread 0 of block 0 reads it",
}


@pytest.mark.parametrize("name", handed_out(kernels=True))
@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
def test_the_folded_kernel_passes_and_what_is_handed_out_does_not(name, tmp_path, capsys):
    given, answer, path = handed_out(kernels=True)[name]
    file = tmp_path / Path(path).name
    file.write_text(given)
    exercises.check(name, str(file))
    said = verdict(capsys)
    assert said.startswith("Not yet: ") and SLOW.get(name, "") in said
    file.write_text(answer)
    exercises.check(name, str(file))
    assert verdict(capsys).startswith(exercises.RIGHT)


# (exercise, what is wrong) -> (a change to the folded answer, a word of what is said about it)
WRONG_KERNELS = {
    ("tile_counts", "no bound"): ("c < width && fires(in[c])", "fires(in[c])", "out of bounds: there are "),
    ("tile_counts", "every sector twice"): (
        "base += WARP) {\n        const int c = base + threadIdx.x;",
        "base += 2 * WARP) for (int k = 0; k < 2; ++k) {\n        const int c = base + 2 * threadIdx.x + k;",
        "touch 512 sectors; 256 are enough",
    ),
    ("row_counts", "the barrier before the write"): (
        "if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = count;\n    __syncthreads();",
        "__syncthreads();\n    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = count;",
        "read part[1] before anybody wrote it",
    ),
    ("row_counts", "thread 0 does all of it"): (
        "if (threadIdx.x == 0) counts[blockIdx.x] = part[0] + part[1] + part[2] + part[3];",
        "if (threadIdx.x == 0) {\n        count = 0;\n        for (int c = 0; c < columns; ++c) count += fires(in[c]);\n"
        "        counts[blockIdx.x] = count;\n    }",
        "the loads touch",
    ),
    ("unpack", "lane 0 does all of it"): (
        "if (threadIdx.x == 0 || threadIdx.x > words[0]) return;\n    const word_t word = words[threadIdx.x];\n   ",
        "if (threadIdx.x) return;\n    for (int i = 1; i <= words[0]; ++i) { const word_t word = words[i];",
        "the result is right. But with 1024 columns, a tile takes",
    ),
}


@pytest.mark.parametrize(("name", "mistake"), WRONG_KERNELS)
@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
def test_wrong_kernels_are_told(name, mistake, tmp_path, capsys):
    old, new, word = WRONG_KERNELS[name, mistake]
    right = handed_out(kernels=True)[name][1]
    assert right.count(old) == 1
    file = tmp_path / f"{name}.cu"
    file.write_text(right.replace(old, new) + ("}" if "for (int i" in new else ""))
    exercises.check(name, str(file))
    said = verdict(capsys)
    assert said.startswith("Not yet: ") and word in said


def pack_by_hand(gate: torch.Tensor, words: int) -> list[int]:
    places = (~(gate <= 0)).nonzero()[:, 0].tolist()
    stored = [(int(gate[place].view(torch.int16)) & 0xFFFF) << 16 | place for place in places]
    return [len(stored), *stored[: words - 1]]


def pool_starts(counts: list[int]) -> list[int | None]:
    """Rows that are lost keep no place."""
    starts, at = [], 0
    for count in counts:
        excess = max(0, count - 31)
        fits = excess > 0 and at + excess <= 64
        starts.append(at if fits else None)
        at += excess if fits else 0
    return starts


def dense_backward_elementwise(x, up, down, dy, fired):
    up, down = up.nan_to_num(), down.nan_to_num()
    h, dh = (x[:, None] * up).sum(-1).relu(), (dy[:, None] * down.T).sum(-1) * fired
    dx = (dh[..., None] * up).sum(1)
    return dx, (dh[..., None] * x[:, None]).sum(0), (h[..., None] * dy[:, None]).sum(0).T


def block_product_densely(blocks, b, size, rows):
    whole = torch.zeros(rows, len(b))
    for (i, j), block in blocks.items():
        whole[i * size : (i + 1) * size, j * size : (j + 1) * size] = block
    return whole @ b


def down_row(words, gate, down_t, overflow=True, tile=256):
    y = torch.zeros(down_t.shape[1])
    for t, of_tile in enumerate(words):
        count, here = int(of_tile[0]), gate[256 * t : 256 * (t + 1)]
        used = of_tile[1 : 1 + min(count, 31)]
        values, columns = (used >> 16).short().view(torch.bfloat16), used & 0xFFFF
        if count > 31 and overflow:
            columns = (~(here <= 0)).nonzero()[:, 0]
            values = here[columns]
        for value, column in zip(values, columns, strict=True):
            y += value.float() * down_t[tile * t + column].float()
    return y


def several_tokens(x, gate, up, down, who=lambda fires: fires.any(0)):
    g = (x @ gate.T).relu()
    firing = who(g > 0).nonzero()[:, 0]
    return (g[:, firing] * (x @ up[firing].T)) @ down[:, firing].T


def cut_error_without_relu(gate, up, down, threshold):
    """A threshold below zero needs the ReLU."""
    exact = down @ (gate.relu() * up)
    return float((down @ (gate * (gate > threshold) * up) - exact).norm() / exact.norm())


def shifted_cut_error(gate, up, down, threshold):
    exact = down @ (gate.relu() * up)
    return float((down @ ((gate - threshold).relu() * up) - exact).norm() / exact.norm())


def cut_positive(x, gate, up, down, threshold):
    activation = torch.nn.functional.silu(gate @ x)
    kept = (activation >= threshold).nonzero()[:, 0]
    return down[:, kept] @ (activation[kept] * (up[kept] @ x))


def wide_interval(before, after):
    difference = after - before
    change, reach = difference.mean().item(), 1.96 * difference.std().item()
    return change - reach, change, change + reach


def differs(layers):
    """Names of the layers that differ from the formula in all rows of x together: large ones hide small ones."""
    found = []
    for name, (layer, gate, up, down) in layers.items():
        x = torch.cat([scale * torch.randn(64, gate.shape[1]) for scale in (0.01, 1.0, 100.0)])
        want = ((x @ gate.T).relu() * (x @ up.T)) @ down.T
        if (layer(x) - want).norm() > 1e-3 * want.norm():
            found.append(name)
    return found


def route_by_a_loop(scores, top_k):
    chosen = scores.topk(top_k).indices
    rows = [(chosen == expert).any(1).nonzero()[:, 0] for expert in range(scores.shape[1])]
    return torch.cat(rows), torch.tensor([len(each) for each in rows])


def route_unsorted(scores, top_k):
    chosen = scores.topk(top_k).indices.flatten()
    return torch.arange(len(chosen)) // top_k, chosen.bincount(minlength=scores.shape[1])


def clocked_behind_others(call, queue, now) -> float:
    start = now()
    queue.launch(call)
    queue.synchronize()
    return 1000 * (now() - start)


def ell_masked(ell, b):
    used = torch.arange(ell.slots) < ell.count[:, None]
    return (torch.where(used, ell.value, 0)[:, :, None] * b[ell.column.long()]).sum(1)


def agrees_everywhere(product) -> bool:
    a, b = torch.randn(30, 40), torch.randn(40, 20)
    return torch.allclose(product(a, b).double(), a.double() @ b.double(), rtol=0.01)


def agrees(product, passes=lambda error: error < 0.01, exact=lambda a, b: a.double() @ b.double()):
    a, b = torch.randn(20, 30), torch.randn(30, 10)
    want = exact(a, b)
    return bool(passes((product(a, b) - want).norm() / want.norm()))


def factor_gradients(before, u, dh, c, sign=torch.sign):
    g = before.relu()
    dh = dh + c * sign(g * u)
    return dh * u * (before > 0), dh * g


def factor_gradients_by_autograd(before, u, dh, c):
    before, u = before.requires_grad_(), u.requires_grad_()
    h = before.relu() * u
    return torch.autograd.grad((h * dh).sum() + c * h.abs().sum(), (before, u))


TILES = torch.cat([packing.one_tile(firing) for firing in (0, 8, 8, 8, 31, 32, 256)])
WITH_NAN = TILES.where(torch.arange(256) != 7, torch.nan)

WRONG = [
    ("weights_read", lambda nnz, d_model: 2 * 29 * 2048),
    # computes all, and hides it
    ("one_token", lambda x, gate, up, down: down.nan_to_num() @ ((gate @ x).relu() * (up.nan_to_num() @ x))),
    ("several_tokens", lambda *given: several_tokens(*given, who=lambda fires: fires.all(0))),
    (
        "several_tokens",
        lambda x, gate, up, down: several_tokens(
            x, gate, up.nan_to_num(), down.nan_to_num(), who=lambda fires: fires.any(0) | True
        ),
    ),
    # small is not zero
    ("may_be_skipped", lambda activation: bool((activation(-torch.rand(1000)).abs() < 0.05).all())),
    ("cut_error", shifted_cut_error),
    ("at_most", 20),
    ("at_most", 3),
    ("csr_bytes", lambda rows, nnz, value_bytes: 8 * rows + nnz * (4 + value_bytes)),  # no last pointer
    ("amdahl", lambda share, times: 1 - share + share * times),  # the mean of the speedups, not of the times
    ("layer_needed", lambda share, wanted: share / (1 / wanted - 1 + share)),  # a negative speedup where there is none
    # 1 / 0
    ("layer_needed", lambda share, wanted: share / (1 / wanted - 1 + share) if share >= 1 - 1 / wanted else None),
    # slower layers left out
    ("share_from", lambda layer, model: max(0.0, (1 - 1 / model) / (1 - 1 / max(layer, 1.001)))),
    # the last that is faster
    ("crossing", lambda points: max((nnz for nnz, times in points if times > 1), default=None)),
    (
        "crossing",
        lambda points: next(((a + b) / 2 for (a, x), (b, y) in itertools.pairwise(points) if x > 1 >= y), None),
    ),  # halfway between them
    # column after column
    (
        "to_coo",
        lambda matrix: (
            [list(each) for each in zip(*(matrix.T.nonzero()[:, [1, 0]].tolist()))] + [matrix.T[matrix.T != 0].tolist()]
        ),
    ),
    ("to_coo", lambda matrix: [*matrix.nonzero().T, matrix[matrix != 0]]),  # tensors
    # empty rows
    ("row_pointers", lambda rows, count: [rows.index(i) if i in rows else 0 for i in range(count)] + [len(rows)]),
    ("csr_pays", lambda rows, columns, value_bytes: value_bytes / (4 + value_bytes)),  # without the pointers
    ("ell_bytes", lambda counts, value_bytes: len(counts) * max(counts) * (4 + value_bytes)),  # without the counts
    ("ell_times_dense", lambda ell, b: ell.to_dense() @ b),
    ("ell_times_dense", lambda ell, b: (ell.value[:, :, None] * b[ell.column.long()]).sum(1)),  # trusts unused slots
    ("break_even_density", lambda dense_ms, slower, conversion_ms: (1 - conversion_ms / dense_ms) / slower),  # above 1
    ("timed_call", clocked_behind_others),
    ("ell_times_dense", ell_masked),  # trusts their columns
    ("agrees", lambda product: agrees(product, passes=lambda error: not error > 0.01)),  # NaN is not above anything
    ("agrees", lambda product: agrees(product, exact=lambda a, b: product(a, b).double())),
    ("agrees", agrees_everywhere),
    ("ran", lambda layer, x: ["t", "mm"]),
    (
        "differences",
        lambda one, other: [name for name in ("device", "shape") if getattr(one, name) != getattr(other, name)],
    ),
    ("clearly_faster", lambda new, old: max(new) < min(old)),
    ("times_in_turns", lambda calls, rounds, timed: {name: [timed(call)] * rounds for name, call in calls.items()}),
    ("csr_times_dense", without_multiplying),
    ("csr_times_dense", lambda csr, b: (csr.to_dense()[:, :, None] * b).sum(1)),  # the same product, element by element
    # the other convention
    ("formula_l1", lambda hidden, l1: l1 * sum(h.abs().sum(-1).mean() for h in hidden) / len(hidden)),
    (
        "firing_share",
        lambda counts, share: (int((counts.cumsum(0) >= share * counts.sum()).int().argmax()) + 1) / len(counts),
    ),
    ("gate_push", lambda gate, up, c: c * up.abs()),  # silent gates, too
    # as far is no further
    (
        "seed_verdict",
        lambda base, again, run: (
            "no difference" if abs(run - base) < abs(again - base) else "worse" if run > base else "better"
        ),
    ),
    ("silent_for", lambda fired: fired.flip(0).int().argmax(0)),  # 0 where it never fired
    ("sparsest_within", lambda runs, twin, more: min(nnz for nnz, loss in runs)),
    ("pack_tile", lambda gate, words: pack_by_hand(gate.nan_to_num(0.0), words)),
    ("pack_tile", lambda gate, words: [min(int((~(gate <= 0)).sum()), words - 1)] + pack_by_hand(gate, words)[1:]),
    ("pack_tile", lambda gate, words: [word - (word >> 31 << 32) for word in pack_by_hand(gate, words)]),  # signed
    # L1 of a sum that is never negative
    ("factor_gradients", lambda *given: factor_gradients(*given, sign=torch.ones_like)),
    ("factor_gradients", factor_gradients_by_autograd),
    ("less_room", {"bytes kept": "fewer", "tokens lost": "more", "gradients": "the same", "rows read": "fewer"}),
    ("launch_of", lambda rows, columns, tile, block: (-(-rows * columns // tile // block), 0)),
    ("every_other", 125),
    ("teams", {4: False, 8: False, 12: True, 16: True, 20: True}),  # as if only the number of steps counted
    ("by_hand", [4, 0x40000001, 0x3F000003, 0x80000004]),  # -0.0 as a value
    ("lossless", lambda round_trip: packing.row_errors(round_trip(TILES), TILES.relu()).median().item() == 0),
    ("lossless", lambda round_trip: packing.same_bits(round_trip(TILES), TILES.relu())),  # without a NaN
    ("larger_tile", {"bytes of words": "the same", "rows that overflow": "more", "values lost": "the same"}),
    ("warp_slot", lambda ballot, lane: (ballot & ((1 << lane) - 1)).bit_count()),  # over the count
    # everything in between as well
    ("sectors", lambda addresses, size: (max(addresses) + size - min(addresses) + 31) // 32),
    ("pool_starts", pool_starts),
    ("plain_backward", dense_backward_elementwise),
    ("occupied", lambda density, height: density * height),  # more than everything, of a tall tile
    ("without_padding", lambda layer, x, real: torch.where(real[..., None], layer(x), 0)),  # computes the padding
    (
        "hot_neurons",
        lambda shares, times: [j for j in shares.argsort(descending=True, stable=True) if shares[j] * times >= 1],
    ),
    ("route", route_by_a_loop),
    ("route", route_unsorted),
    # the mean of each token's
    (
        "recall_and_precision",
        lambda fires, chosen: tuple(
            float(((fires & chosen).sum(1) / of.sum(1).clamp(min=1)).mean()) for of in (fires, chosen)
        ),
    ),
    (
        "token_bytes",
        lambda d_model, d_ff, firing, rank, chosen, size: (
            3 * d_ff * d_model * size,
            (d_ff + 2 * firing) * d_model * size,
            3 * chosen * d_model * size,
        ),
    ),
    # signs count
    ("threshold_for", lambda values, sparsity: float(values.sort().values[round(sparsity * len(values))])),
    # zeros do not count
    ("threshold_for", lambda values, sparsity: float(values[values != 0].abs().quantile(sparsity))),
    ("cut_token", cut_positive),  # drops the negative ones
    ("paired_interval", wide_interval),
    ("l1_at", lambda step, l1, delay, ramp: l1 * min(1.0, (step - delay) / max(ramp, 1))),  # below zero at first
    # as if the twin stood still
    ("won_back", lambda before, at_once, after, twin: (at_once - after) / (at_once - before)),
    # dense layers, too
    ("share_saved", lambda layers: sum(2 * (d - n) for d, n, _ in layers) / sum(3 * d for d, *_ in layers)),
    ("must_stay", differs),
    # 0, or less, for a light first token
    ("hiding_window", lambda first, later, within: round((first - later) / (within * later))),
    # not in pairs
    ("is_faster", lambda turns: statistics.median(d for d, _ in turns) > statistics.median(o for _, o in turns)),
    (
        "cut_or_train",
        lambda cut, trained: "train" if trained[1] < cut[1] else "cut" if cut[0] < trained[0] else "measure more",
    ),
    ("plain_call", lambda dense, ours: sum(dense) / sum(ours)),  # one after the other
    ("energy_saved", lambda dense, ours: 1 - ours[0] * ours[1] / (dense[0] * dense[1])),  # a step's, not a token's
    # by the middle
    ("deepest_cut", lambda points, most: max((s for s, _, change, _ in points if change <= most), default=0.0)),
    ("deepest_cut", lambda points, most: next((s for s, *_, high in points if high <= most), 0.0)),  # as if sorted
    ("front", lambda points: sorted(a for a in points if not any(b[0] < a[0] and b[1] < a[1] for b in points))),
    # all ties
    ("keep_largest", lambda sizes, count: sizes >= sizes.flatten().sort(descending=True).values[max(0, count - 1)]),
    ("two_four", lambda weight: weight.abs() >= weight.abs().median()),  # half of all, not of each four
    # 2 bits for every value
    ("two_four_bytes", lambda rows, columns, size: rows * columns // 2 * size + rows * columns // 4),
    ("empty_blocks", lambda sparsity, size: sparsity**size),
    ("pays_after", lambda conversion, sparse, dense: int(conversion / max(dense - sparse, 1e-9)) + 1),
    ("block_product", lambda blocks, b, size, rows: torch.zeros(rows, b.shape[1])),
    ("block_product", lambda blocks, b, size, rows: block_product_densely(blocks, b, size, rows)),
    ("quantise_row", lambda row: ((row / (row.max() / 127)).round(), row.max() / 127)),  # forgets the negative ones
    # within its tile
    ("read_word", lambda word, t: (torch.tensor(word >> 16).short().view(torch.bfloat16).item(), word & 0xFFFF)),
    ("read_word", lambda word, t: (float(word >> 16), 256 * t + (word & 0xFFFF))),  # bits as a whole number
    ("down_row", lambda words, gate, down_t: down_row(words, gate, down_t, tile=0)),  # columns within their tiles
    ("row_sectors", lambda column, d_model: -(-2 * d_model // 32)),
    # no sectors
    ("floor_bytes", lambda counts, d_model: sum(4 * (1 + count) for count in counts) + sum(counts) * 2 * d_model),
    ("least_us", lambda l2, memory, l2_rate, rate: 1e6 * (l2 / l2_rate + memory / rate)),
    # of the tiles, not of the rows
    ("fewest_words", lambda counts, share: int(counts.double().quantile(1 - share)) + 1),
]


def called_at_once(call, queue, now):
    start = now()
    call()
    queue.synchronize()
    return 1000 * (now() - start)


FAULTS = [
    ("gate_push", lambda gate, up, c: c * up * (gate > 0), "should be [1.5, 3, 0, 0]; yours gave tensor(["),
    ("firing_share", lambda counts, share: 0.25, "firing_share([1, 1, 1, 1], 0.5) should be 0.5; yours gave 0.25."),
    ("may_be_skipped", lambda activation: True, "may_be_skipped gave True for silu, which makes -0.278 of -1.28."),
    ("cut_error", cut_error_without_relu, "at -0.5, where a cut takes silent neurons alone, should be 0"),
    ("timed_call", called_at_once, "queue.launch(call) puts the call into the queue."),
    ("by_hand", [3, 0x40000001, 0x3F000003, 0x3F800005], "word 0 is not 0x00000003: it counts all that fire"),
    ("by_hand", [4, 0x00014000, 0x3F000003, 0x3F800005], "word 1 is not 0x00014000.\n"),
    ("lossless", lambda round_trip: torch.equal(round_trip(WITH_NAN), WITH_NAN.relu()), "A NaN does not equal itself"),
    ("is_faster", lambda turns: False, "should be True; yours gave False."),
    (
        "down_row",
        lambda words, gate, down_t: torch.where(gate <= 0, 0, gate).float() @ down_t.nan_to_num().float(),
        "row 0: its products take",
    ),
    ("down_row", lambda words, gate, down_t: down_row(words, gate, down_t, overflow=False), "row 0, should have"),
    ("weights_read", lambda nnz, d_model: nnz / 0, "ZeroDivisionError"),
]


def test_each_check_meets_a_typical_mistake():
    """Those of the puzzles and of the capstone's kernels stand in their folders of tests/course."""
    mistaken = {name for name, _ in [*WRONG_KERNELS, *WRONG]} | {name for name, *_ in FAULTS}
    elsewhere = {name for name, puzzle in puzzles.PUZZLES.items() if puzzle.notebook != "08"} | {*STEPS, "down"}
    assert exercises.CHECKS.keys() - mistaken == elsewhere


@pytest.mark.parametrize(("name", "answer"), WRONG)
def test_wrong_answers_are_told(name, answer, capsys):
    exercises.check(name, answer)
    assert verdict(capsys).startswith("Not yet: ")


@pytest.mark.parametrize(("name", "theirs"), [(name, own) for name, each in exercises.THEIRS.items() for own in each])
def test_what_the_library_has_already_is_no_answer_however_it_was_imported(name, theirs, capsys):
    body = getattr(theirs, "__func__", theirs).__code__
    exercises.check(name, theirs)
    assert "that is the library's own" in verdict(capsys)
    assert getattr(theirs, "__func__", theirs).__code__ is body  # it works again


@pytest.mark.parametrize(("name", "wrong", "words"), FAULTS)
def test_the_fault_is_named(name, wrong, words, capsys):
    exercises.check(name, wrong)
    assert words in verdict(capsys)
