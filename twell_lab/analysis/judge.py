"""Whether a path is taken: candidates of one class of token counts by their times, beside dense and the layer as it
was. The rules are points 6 and 7 of what twell_lab.analysis.planner says at its top."""

from __future__ import annotations

from collections.abc import Mapping

from ..layers.choice import DENSE, Candidate, Choice
from ..layers.paths import PATHS
from .trials import Times, Trial

MARGIN = 0.97  # a sparse path that was timed on the layer is taken up to this share of the dense time
MARGIN_SHARED = 0.95  # up to this one where it was timed on a layer like it
MARGIN_PREDICTED = 0.90  # and up to this one where nothing was timed
CLOSE = 1.02  # one that splits no neurons, which mostly holds fewer copies of weights, may take this much longer
HIDDEN = 0.5  # the share of a path's device time up to which its host time does not count


def expected(predicted: dict[Choice, float], last: Trial | None) -> dict[Choice | None, Times]:
    """Times by predictions that are as far off as they were where each path was timed last, or as the worst of those;
    the host takes as long as it did there. Without such a trial, the predictions."""
    if last is None:
        return {choice: Times(us) for choice, us in predicted.items()}
    off: dict[str, float] = {}
    hosts: dict[str, float | None] = {}
    for choice, us in last.predicted.items():
        taken = last.times[choice]
        off[choice.path] = max((taken.device or taken.call) / us, off.get(choice.path, 0.0))
        hosts[choice.path] = taken.host
    times: dict[Choice | None, Times] = {}
    for choice, us in predicted.items():
        host, device = hosts.get(choice.path), us * off.get(choice.path, max(off.values()))
        times[choice] = Times(device) if host is None else Times(max(device, host), host, device)
    return {None: times[DENSE]._replace(host=last.times[None].host), **times}


def barred(
    choice: Choice, times: Mapping[Choice | None, Times], margin: float, slack: float = 1.0, saved: float = 0.0
) -> str | None:
    """Why a choice is not taken; None if it may be.

    times: of the choice, of dense and, as None, of the layer as it was. margin: the share of dense's time that it may
    take; slack: of dense's host and device time. saved: what compiling takes off dense's time."""
    taken, dense = times[choice], times[DENSE]
    before = times.get(None, dense)
    call = min(dense.call, before.call)
    if not taken.call <= margin * (call - saved):
        compiled = " would be compiled" if taken.call <= margin * call else ""
        return f"less than {100 * (1 - margin):.0f}% faster than dense{compiled}"
    devices = [each.device for each in (dense, before) if each.device is not None]
    # Of the host, dense means the layer as it was: our own dense path may take less.
    for clock, us, limit in (("host", taken.host, before.host), ("device", taken.device, min(devices, default=None))):
        if us is None or limit is None or us <= slack * limit:
            continue
        if clock == "device" or taken.device is None or us > HIDDEN * taken.device:
            return f"faster, but its {clock} time, {us:.4g} us, is above dense's, {limit:.4g}"
    return None


def judge(
    tokens: int,
    predicted: dict[Choice, float],
    times: Mapping[Choice | None, Times],
    margin: float,
    how: str,
    saved: float = 0.0,
    timed_on: str | None = None,
    errors: Mapping[Choice, float] | None = None,
) -> list[Candidate]:
    """The candidates of one class with their times, one of them chosen, and why each is or is not.

    times: of dense, of other candidates and, as None, of the layer as it was, known as `how` says; without that last
    one it counts as long as dense. margin: the share of the dense time that a sparse path may take. saved: what
    compiling would take off that: who compiles the model should not lose by the choice either. timed_on: the layer that
    was timed; None: nothing was, and the times are expected ones. errors: of lossy choices that were timed.
    """
    before = times.get(None, times[DENSE])
    taken = {choice: times[choice] for choice in predicted if choice in times}
    bars = {choice: barred(choice, times, margin, saved=saved) for choice in taken if choice != DENSE}
    may = sorted((c for c, bar in bars.items() if bar is None), key=lambda c: taken[c].call)
    chosen = next((c for c in may if not c.hot and taken[c].call <= CLOSE * taken[may[0]].call), (*may, DENSE)[0])
    fastest = min(taken, key=lambda choice: taken[choice].call)

    def why(choice: Choice) -> str:
        if choice not in taken:
            return f"not timed: predicted {predicted[choice] / min(predicted.values()):.2f}x the best prediction"
        if choice == chosen == DENSE:
            return f"fastest, {how}" if fastest == DENSE else f"{fastest} is {bars[fastest]}, {how}"
        if choice == chosen:
            first = "fastest" if choice == fastest else "fastest of those that may be taken"
            first = first if choice == may[0] else f"as fast as {may[0]}, and splits no neurons"
            return f"{first}, {how}" + (
                f": {before.call / taken[choice].call:.2f}x dense" if timed_on is not None else ""
            )
        if choice == fastest and bars[choice] is not None:
            return f"{bars[choice]}, {how}"
        close = " (too little for what splitting takes)" if choice in may and choice == may[0] else ""
        return f"{taken[choice].call / taken[chosen].call:.2f}x the time of the choice{close}, {how}"

    def candidate(choice: Choice) -> Candidate:
        judged, said = (tokens, choice.path, choice.hot, predicted[choice]), why(choice)
        if not PATHS[choice.path].exact:
            off = (errors or {}).get(choice)
            said += "; lossy" if off is None else f"; lossy: its output is {off:.2%} off"
        if timed_on is None or choice not in taken:
            return Candidate(*judged, None, choice == chosen, said)
        call, host, device = taken[choice]
        return Candidate(*judged, call, choice == chosen, said, host, device, before.call, timed_on)

    return [candidate(choice) for choice in predicted]
