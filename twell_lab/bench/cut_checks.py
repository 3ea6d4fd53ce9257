"""Whether layers with thresholds, and a model of them, are computed right: what is asked of them before they are timed.

A value at a threshold is kept or dropped by its last bit, and two right computations that add in another order differ
there: so in a model they soon keep different values, and the logits of one step may be off by much more than roundings
make. One step, or the few sequences of a batch, say nothing: whichever of two right models dropped the weightier value
is further from float32 there. So two things are asked.

1. Each layer, of the inputs that it gets in the model (`CutLayer`): the same input to both, so that the same of it is
   kept, and float64 beside them with the values kept that the layer under test kept. Of the hidden values the layer
   shows only the sum; which ones it kept is free where roundings can carry a value across the threshold (`doubtful`),
   and nowhere else. With these given, its error may be what the library promises (ops.accuracy): twice that of torch's
   layer plus a unit in the last place. A value more that is dropped or kept, a wrong scale or a wrong threshold is off
   by more. Where an input is no number, so is the result where torch's is.
2. The whole model (`model_ratio`): the distance of its logits from those of the float32 model with the same thresholds,
   over that of the dense model in the same dtype, token by token. If both are right, either is as likely to be the
   further one: the logarithm of the ratio has a mean of zero, over tokens. That mean may be the logarithm of MARGIN, as
   for other models. One token says little of it, so tokens are read until it is three standard errors away from that
   limit, on whichever side. In a forward (`forward_ratio`) the tokens of a sequence read what was kept for earlier
   ones, so a sequence counts as one, with the mean of its tokens.

The float32 model is the dense one where that is in float32 itself: then SLACK of the logits' norm is allowed, as for
other models.

`Judge` asks both of a model that is to be timed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..layers.activations import is_threshold
from ..layers.find import FeedForward
from ..layers.lossy import ThresholdedActivation
from ..layers.sparse_ffn import SparseFFN
from ..ops import accuracy, clock, reference
from .causal import Causal
from .workloads import MARGIN, SLACK, Models, Tokens, Workload, compared_part, is_compiled

ERRORS = 3.0  # standard errors between a mean and its limit
LEAST, MOST = 128, 8192  # tokens that are read before the mean is looked at, and at most
SEQUENCES = 16, 1024  # the same for sequences, where each counts as one
_WINDOWS = 64  # windows of which keys and values are held at a time
_EXACT = 4  # sequences that the float32 model reads at a time
_ROWS = 64  # tokens of an input that a layer is judged by
_SLOPE = 1.13  # the steepest that a SiLU or GELU is; a ReLU is less
_SUMS = torch.finfo(torch.float32).eps  # an addition's rounding: sums are float32, at worst


class CutLayer:
    """A dense layer with thresholds, and its weights in float64, to judge another layer that computes the same.

    layer: as `feed_forwards` lists it; `has_thresholds` says whether it has any: on the activation (CATS, FATReLU), or
    on the inputs and hidden values (TEAL)."""

    def __init__(self, layer: FeedForward) -> None:
        self.layer, self.cut = layer, layer.cut
        acts = layer.acts
        self.act = acts.activation if isinstance(acts, ThresholdedActivation) else acts
        if not layer.cut and not isinstance(acts, ThresholdedActivation) or acts is None:
            self.act = reference.relu  # a FATReLU keeps of a ReLU what is above its threshold
        self.threshold = layer.cut.hidden if layer.cut else acts.threshold
        self._gate, self._up, self._down = (
            None if part is None else tuple(None if t is None else t.double() for t in (part.weight, part.bias))
            for part in (layer.gate, layer.up, layer.down)
        )

    @torch.no_grad()
    def ratio(self, sparse, xs: list[Tensor]) -> float:
        """The worst error of sparse(x) for these inputs [..., d_model], over what is allowed: at most 1.0 where the
        layer is right. Of many tokens _ROWS are looked at, the first and the last among them.

        Raises clock.WrongResult where the dense layer itself is not, since its error is what is allowed."""
        worst = 0.0
        for x in xs:
            entered: list[Tensor] = []
            hook = self.layer.down.register_forward_pre_hook(lambda _, args, into=entered: into.append(args[0]))
            try:
                dense = self.layer.module(x)
            finally:
                hook.remove()
            rows = [t.reshape(-1, t.shape[-1]) for t in (x, sparse(x), dense, entered[0])]
            some = torch.linspace(0, len(rows[0]) - 1, min(_ROWS, len(rows[0])), device=x.device).long()
            rows = [t[some] for t in rows]
            worst = max(worst, self._worst(*rows))
        return worst

    def _worst(self, x: Tensor, y: Tensor, dense: Tensor, hidden: Tensor) -> float:
        finite = x.isfinite().all(1)
        if not torch.equal(y.isnan(), dense.isnan()) or not torch.equal(y[~finite].isinf(), dense[~finite].isinf()):
            return math.inf
        x, y, dense, hidden = x[finite], y[finite], dense[finite], hidden[finite]
        if torch.equal(y, dense) or not len(x):
            return 0.0
        decides, worth, doubtful = self._hidden(x)
        own = hidden != 0
        off = dense.double() - self._result(worth, own)
        if not off.norm() <= 0.05 * dense.double().norm():  # 16-bit values make a few thousandths
            raise clock.WrongResult(f"{self.layer.name}: the dense layer itself is off: nothing was timed")
        exact = ~(decides.abs() < self._bound(x.dtype))
        starts = torch.where(doubtful, own, exact), exact
        return max(
            min(self._row(worth[i], start[i], doubtful[i], y[i], off[i]) for start in starts) for i in range(len(x))
        )

    def _bound(self, dtype: torch.dtype) -> float:
        """The hidden values' threshold, which torch rounds to the type of what it compares it with."""
        return torch.tensor(self.threshold, dtype=dtype).item()

    def _hidden(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By neuron, float64 or boolean [tokens, d_ff]: what its threshold looks at, what it adds to the hidden values
        if it is kept, and whether roundings may decide that.

        A projection is off by the roundings of its sums and its own one; behind the activation by _SLOPE times that and
        another one; a product of two by each times the other, and another one."""
        inputs = (self.cut.of_input(x) if self.cut else x).double()
        one = torch.finfo(x.dtype).eps / 2

        def projected(part: tuple) -> tuple[Tensor, Tensor]:
            weight, bias = part
            size = linear(inputs.abs(), weight.abs(), None if bias is None else bias.abs())
            value = linear(inputs, weight, bias)
            return value, weight.shape[1] * _SUMS * size + one * value.abs()

        first, off = projected(self._up if self._gate is None else self._gate)
        value, off = self.act(first.clone()), _SLOPE * off
        off = off + one * (value.abs() + off)
        worth = value
        if self._gate is not None:
            up, of_up = projected(self._up)
            worth = value * up
            both = off * up.abs() + value.abs() * of_up + off * of_up
            both = both + one * (worth.abs() + both)
        decides, off = (worth, both if self._gate is not None else off) if self.cut else (value, off)
        return decides, worth, (decides.abs() - self._bound(x.dtype)).abs() <= off

    def _result(self, worth: Tensor, keep: Tensor) -> Tensor:
        return linear(torch.where(keep, worth, 0.0), *self._down)

    def _row(self, worth: Tensor, keep: Tensor, doubtful: Tensor, y: Tensor, off: Tensor) -> float:
        """The ratio of one token, for the best way that is found to keep its doubtful neurons: those that bring the
        exact result closest to y are counted the other way, one after the other, until it keeps the bound."""
        keep, which = keep.clone(), doubtful.nonzero()[:, 0]
        adds = worth[which, None] * self._down[0].t()[which]  # [doubtful, d_model]: what each adds to y
        square, best = adds.square().sum(1), math.inf
        for _ in range(len(which) + 1):
            exact = self._result(worth, keep)
            # The dense layer's error, with the values that it kept itself.
            ratio, _ = accuracy.worst_row(y[None], (exact + off)[None], exact[None])
            best = min(best, ratio)
            if best <= 1.0 or not len(which):
                break
            change = torch.where(keep[which], -1.0, 1.0)
            gain = 2 * change * (adds @ (y.double() - exact)) - square  # by how much each lowers the distance, squared
            i = int(gain.argmax())
            if not gain[i] > 0:
                break
            keep[which[i]] = ~keep[which[i]]
        return best


def hard_inputs(layer: FeedForward, x: Tensor) -> list[Tensor]:
    """Two more inputs like this one [..., d_model]: with values at the threshold of inputs (0 if the layer has none),
    and with one that is no number."""
    at = layer.cut.input if layer.cut else 0.0
    tied, spoilt = x.clone(), x.clone()
    tied[..., ::3], tied[..., 1::5] = at, -at
    spoilt.view(-1, spoilt.shape[-1])[0, 1] = math.nan
    return [tied, spoilt]


def model_ratio(
    exact: Causal,
    dense: Causal,
    sparse: Causal,
    cache: Causal,
    tokens: Tokens,
    batch: int,
    cached: int,
    *,
    head: bool = True,
    compiled: bool = False,
) -> tuple[float, int]:
    """How much further the sparse model's logits are from the float32 one's than the dense model's, over MARGIN: at
    most 1.0 where it is right; and how many tokens said so, as this module's first lines say.

    A token is the last of `cached`, and the keys and values of the others are those of the model `cache`, the same for
    all models; `batch` tokens are computed at a time. head, compiled: as Causal.stepper takes them. Raises
    clock.WrongResult where MOST tokens, or all that the text has, do not decide."""

    def found() -> Iterator[list[float]]:
        ours, theirs = sparse.stepper(head, compiled=compiled), dense.stepper(head)
        for right, steps in _chunks(exact, cache, tokens, batch, cached, head):
            for some, ids, kept in steps:
                yield _logs(right[some], ours(ids, kept), theirs(ids, kept), exact is dense).tolist()

    return _decided(found(), LEAST, "tokens")


def forward_ratio(
    exact: Causal,
    dense: Causal,
    sparse: Causal,
    tokens: Tokens,
    sequences: int,
    length: int,
    *,
    head: bool = True,
    compiled: bool = False,
) -> tuple[float, int]:
    """As `model_ratio`, of forwards of so many sequences; and how many sequences said so."""
    how = "all" if head else "none"

    def found() -> Iterator[list[float]]:
        ours, theirs, right = sparse.reader(how, compiled=compiled), dense.reader(how), exact.reader(how)
        for ids in _windows(tokens, SEQUENCES[1], length).split(sequences):
            if len(ids) == sequences:
                parts = torch.cat([compared_part(right(some)) for some in ids.split(_EXACT)])
                both = (compared_part(read(ids)) for read in (ours, theirs))
                yield _logs(parts, *both, exact is dense).mean(1).tolist()

    return _decided(found(), SEQUENCES[0], "sequences")


def _logs(right: Tensor, ours: Tensor, theirs: Tensor, same: bool) -> Tensor:
    """For each token the logarithm of the one distance over the other. same: whether right is what `theirs` is."""
    size = right.norm(dim=-1)
    off = [(each.float() - right).norm(dim=-1) for each in (ours, theirs)]
    # Where both are exact they are equally good.
    return ((off[0] + 1e-6 * size) / (off[1] + (SLACK if same else 1e-6) * size)).log()


@torch.no_grad()
def _decided(found: Iterator[list[float]], least: int, what: str) -> tuple[float, int]:
    """The mean of as many of these logarithms as it takes, as a ratio over MARGIN, and how many these were."""
    read: list[float] = []
    mean, error = math.nan, math.inf
    for some in found:
        read += some
        mean, error = _mean(read)
        if not mean < math.inf:
            return math.inf, len(read)
        if len(read) >= least and abs(mean - math.log(MARGIN)) >= ERRORS * error:
            return math.exp(mean) / MARGIN, len(read)
    raise clock.WrongResult(
        f"{len(read):,} {what} do not say whether the logits are right: on average they are "
        f"{math.exp(mean):.3g} times as far off as the dense model's, give or take {error:.2g}; {MARGIN} is allowed"
    )


def _mean(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    both = torch.tensor(values, dtype=torch.float64)
    return both.mean().item(), both.std().item() / math.sqrt(len(both)) if len(both) > 1 else math.inf


def _windows(tokens: Tokens, most: int, length: int) -> Tensor:
    """Different windows from all over what is measured of a text, in random order: int64 [up to `most`, length]."""
    here = None if tokens.text is None else tokens.part(tokens.MEASURED)
    count = most if here is None else min(most, len(here) - length + 1)
    ids = tokens.windows(tokens.MEASURED, count, length)
    return ids[torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(ids.device)]


def _chunks(
    exact: Causal, cache: Causal, tokens: Tokens, batch: int, cached: int, head: bool
) -> Iterator[tuple[Tensor, list]]:
    """For some windows of a text at a time what is right for their last tokens, [windows, 1, n], and for each step
    (which of them, their ids, the keys and values before them)."""
    dtype, right = next(cache.model.parameters()).dtype, exact.stepper(head)
    for some in _windows(tokens, MOST, cached).split(batch * max(1, _WINDOWS // batch)):
        kept = cache.keep(some[:, :-1])
        few = [slice(at, at + _EXACT) for at in range(0, len(some), _EXACT)]
        exactly = [right(some[part, -1:], kept.part(part, torch.float32)).float() for part in few]
        parts = (slice(at, at + batch) for at in range(0, len(some) - batch + 1, batch))
        yield torch.cat(exactly), ((part, some[part, -1:], kept.part(part, dtype)) for part in parts)


Seen = Callable[[FeedForward, Tensor], object]


def see_inputs(layers: list[FeedForward], call: Callable[[], object], see: Seen) -> None:
    """Hand see(layer, x) what enters these layers of a model while call() runs it. What enters them while see itself
    runs is not handed over."""
    busy = False

    def enters(_, args: tuple, layer: FeedForward) -> None:
        nonlocal busy
        if not busy:
            busy = True
            try:
                see(layer, args[0])
            finally:
                busy = False

    hooks = [each.module.register_forward_pre_hook(functools.partial(enters, layer=each)) for each in layers]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()


def inputs_of(layers: list[FeedForward], call: Callable[[], object]) -> dict[str, list[Tensor]]:
    """Return what enters these layers of a model while call() runs it, by their names."""
    seen: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
    see_inputs(layers, call, lambda layer, x: seen[layer.name].append(x.clone()))
    return seen


# ---- a model that is to be timed ----


def has_thresholds(layer: FeedForward) -> bool:
    """Return whether a layer's values are kept or dropped by a threshold at which its result jumps."""
    return bool(layer.cut) or layer.acts is not None and is_threshold(layer.acts)


class Judge:
    """Says whether a workload of models whose layers have thresholds is computed right, as workloads.workload_rows
    asks. Make it while the Models still have their float32 one, which it keeps."""

    def __init__(self, models: Models) -> None:
        assert models.exact is not None
        self.models, self.exact = models, models.exact
        self.layers = [CutLayer(layer) for layer in models.layers if has_thresholds(layer)]

    @torch.no_grad()
    def __call__(self, work: Workload, path: str) -> dict:
        """Return what the row of this path says of the checks. Raises clock.WrongResult where it is not right."""
        compiled, sparse = is_compiled(path), self.models.model_of(path)
        facts = {}
        if not compiled and (worst := self._layers(work, sparse.model)) is not None:
            facts["layer_over_allowed"] = round(worst, 4)
        how = {"head": work.head, "compiled": compiled}
        given = self.exact, self.models.dense, sparse
        if work.kind == "model_decode":
            sizes = work.sequences, work.length
            ratio, read = model_ratio(*given, self.models.dense, self.models.tokens, *sizes, **how)
        else:
            ratio, read = forward_ratio(*given, self.models.tokens, work.sequences, work.length, **how)
        what = "tokens" if work.kind == "model_decode" else "sequences"
        if not ratio <= 1.0:
            raise clock.WrongResult(
                f"the logits of {read:,} {what} are off by {ratio:.3g} times what is allowed on average"
            )
        return facts | {"error_over_allowed": round(ratio, 4), f"compared_{what}": read}

    def _layers(self, work: Workload, model: nn.Module) -> float | None:
        """The worst ratio of the swapped layers with thresholds, of what enters them in this workload; None where none
        can be called by itself."""
        swapped = {
            name: each for name, each in model.named_modules() if isinstance(each, SparseFFN) and each.registered
        }
        judges = {each.layer.name: each for each in self.layers if each.layer.name in swapped}
        worst: list[float] = []

        def see(layer: FeedForward, x: Tensor) -> None:
            name, first = layer.name, layer.name not in seen
            seen.add(name)
            ratio = judges[name].ratio(swapped[name], [x, *(hard_inputs(layer, x) if first else ())])
            if not ratio <= 1.0:
                raise clock.WrongResult(f"{name} is off by {ratio:.3g} times what is allowed")
            worst.append(ratio)

        seen: set[str] = set()
        run = work.makes(self.models.dense, False)
        see_inputs([each.layer for each in judges.values()], lambda: run(0), see)
        return max(worst, default=None)
