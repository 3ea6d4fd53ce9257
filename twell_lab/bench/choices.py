"""A multiple-choice set that needs no download: which of four continuations belongs to a piece of text?

Questions are drawn from a text that the model was not trained on, the same ones for the same text and seed. The answer
is the option with the highest mean log-likelihood of its tokens after the context, as lm-eval and others score such
sets. It measures how well a model follows a text, at a chance level that is known; it is no benchmark of knowledge, and
its accuracies compare with those of other models on the same questions alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import InputError

OPTIONS = 4
CHANCE = 1 / OPTIONS
Z = 1.959964  # a standard normal number lies between -Z and Z with a probability of 95%
_TRIES = 100  # draws of a distractor, until it differs from the other options
_AT_ONCE = 32  # questions that are answered in one forward


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions on a text of n tokens.

    Attributes:
        context: int64 [questions, tokens], what comes before.
        options: int64 [questions, OPTIONS, tokens], no two of a question alike. One is what follows in the text; the
            others, of the same length, are from places that do not touch context or continuation.
        right: int64 [questions], which option follows.
    """

    context: Tensor
    options: Tensor
    right: Tensor

    @classmethod
    def draw(cls, tokens: Tensor, count: int = 800, context: int = 192, length: int = 16, seed: int = 0) -> Questions:
        """Questions spread evenly over `tokens`, integers [n] on the CPU, none of which overlaps another.

        Raises InputError for sizes that are no whole numbers from 1 up, tokens that are no integers, a text that is too
        short for so many questions, and one that repeats itself so often that four different options are not found."""
        for name, value in {"count": count, "context": context, "length": length}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r:.80}; a whole number from 1 up is accepted")
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise InputError(f"tokens are {tokens.dtype}; integers are accepted")
        whole = context + length
        if tokens.dim() != 1 or len(tokens) < max(count, 2) * whole:
            raise InputError(
                f"tokens is {list(tokens.shape)}; {count} questions of {context} and {length} tokens take a text "
                f"[{max(count, 2) * whole}] or longer"
            )
        draw = torch.Generator().manual_seed(seed)
        starts = torch.arange(count) * (len(tokens) - whole) // max(1, count - 1)
        right = torch.randint(OPTIONS, (count,), generator=draw)
        places = torch.randint(len(tokens) - length + 1, (count, OPTIONS), generator=draw)
        places[torch.arange(count), right] = starts + context
        false = torch.arange(OPTIONS) != right[:, None]
        for _ in range(_TRIES):
            options = tokens[places[..., None] + torch.arange(length)].long()
            alike = (options[:, :, None] == options[:, None]).all(-1).tril(-1)  # to an option before
            touching = (places + length > starts[:, None]) & (places < starts[:, None] + whole)
            # Of two that are alike one is drawn again: the later, but never the true one.
            wrong = touching | alike.any(2) | (alike & ~false[:, :, None]).any(1)
            if not (wrong := wrong & false).any():
                return cls(tokens[starts[:, None] + torch.arange(context)].long(), options, right)
            places[wrong] = torch.randint(len(tokens) - length + 1, (int(wrong.sum()),), generator=draw)
        raise InputError(
            f"{int(wrong.any(1).sum())} of {count} questions have no {OPTIONS} different options of {length} tokens "
            f"after {_TRIES} draws: the text repeats itself; longer options or another text are accepted"
        )


@dataclass(frozen=True, eq=False)
class Answers:
    """What a model makes of Questions.

    scores: mean log-likelihood of each option's tokens, nats, float64 [questions, OPTIONS] on the CPU; minus infinity
    where it is no number. right: as in Questions."""

    scores: Tensor
    right: Tensor

    @property
    def best(self) -> Tensor:
        """bool [questions, OPTIONS]: whether no other option has a higher score. Several do where they are equal."""
        return self.scores == self.scores.max(1, keepdim=True).values

    @property
    def correct(self) -> float:
        """Return how many questions were answered rightly. Where several options are best one of them is drawn, in the
        mean: each counts its share."""
        mine = self.best.gather(1, self.right[:, None])[:, 0]
        return float((mine.double() / self.best.sum(1)).sum())

    @property
    def accuracy(self) -> float:
        """The share of questions answered rightly; CHANCE for who knows nothing."""
        return self.correct / len(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the accuracy."""
        return wilson(self.correct, len(self.right))

    def changed(self, other: Answers) -> int:
        """On how many questions another model chooses otherwise."""
        return int((self.best != other.best).any(1).sum())

    def facts(self) -> dict:
        """Return what a row says of them."""
        low, high = self.interval
        found = {"accuracy": self.accuracy, "accuracy_low": low, "accuracy_high": high, "chance": CHANCE}
        return {name: round(each, 5) for name, each in found.items()} | {"questions": len(self.right)}


@torch.no_grad()
def answer(read: Callable[[Tensor], Tensor], questions: Questions, device: torch.device | str = "cpu") -> Answers:
    """Have a model answer. read: ids int64 [sequences, tokens] on the device -> logits [sequences, tokens, vocabulary],
    as causal.Causal.reader gives it."""
    scores, length = [], questions.options.shape[2]
    for context, options in zip(questions.context.split(_AT_ONCE), questions.options.split(_AT_ONCE), strict=True):
        before = context[:, None].expand(-1, OPTIONS, -1)
        ids = torch.cat([before, options], 2).flatten(0, 1).to(device)
        logits = read(ids[:, :-1])[:, -length:].float()
        each = -F.cross_entropy(logits.transpose(1, 2), ids[:, -length:], reduction="none").double().mean(1)
        scores.append(each.nan_to_num(nan=-math.inf).view(-1, OPTIONS).cpu())
    return Answers(torch.cat(scores), questions.right)


def wilson(correct: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of which `correct` of `count` were seen (Wilson, 1927). It holds at 0 and at 1 as
    well, where that of the normal distribution has no width."""
    if count < 1 or not 0 <= correct <= count:
        raise InputError(f"correct is {correct!r:.80} of {count!r:.80}; from 0 to the count, which is 1 or more")
    share, more = correct / count, Z * Z / count
    middle = (share + more / 2) / (1 + more)
    reach = math.sqrt(share * (1 - share) * more + more * more / 4) / (1 + more)
    return 0.0 if correct == 0 else middle - reach, 1.0 if correct == count else middle + reach
