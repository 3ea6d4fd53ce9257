"""Multiple-choice questions drawn from a text: what they are made of, and how answers are scored."""

import math

import pytest
import torch

from twell_lab.bench.choices import CHANCE, OPTIONS, Questions, answer, wilson
from twell_lab.core import InputError


@pytest.fixture(scope="module")
def text():
    """Each token is known from the two before it, and pairs repeat seldom."""
    tokens = [1, 2]
    while len(tokens) < 20_000:
        tokens.append((31 * tokens[-1] + 17 * tokens[-2] + 5) % 251)
    return torch.tensor(tokens, dtype=torch.uint8)


def oracle(ids):
    """Logits of the one who knows the rule of `text`."""
    before = torch.cat([ids[:, :1], ids[:, :-1]], 1)
    return 9.0 * torch.nn.functional.one_hot((31 * ids + 17 * before + 5) % 251, 256).float()


def test_a_question_holds_what_follows_and_three_pieces_from_elsewhere():
    text = torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    questions = Questions.draw(text, 60, 40, 8, seed=3)
    assert questions.context.shape == (60, 40) and questions.options.shape == (60, OPTIONS, 8)
    windows = text.long().unfold(0, 48, 1)
    pieces = {tuple(each) for each in text.long().unfold(0, 8, 1).tolist()}
    begins = []
    for context, options, right in zip(questions.context, questions.options, questions.right, strict=True):
        whole = torch.cat([context, options[right]])
        begins.append(int((windows == whole).all(1).nonzero()[0]))
        assert len({tuple(each) for each in options.tolist()}) == OPTIONS
        assert all(tuple(each) in pieces for each in options.tolist())
    assert all(b - a >= 48 for a, b in zip(begins, begins[1:])) and begins[0] == 0 and begins[-1] == len(text) - 48
    assert questions.right.bincount(minlength=OPTIONS).min() > 5


def test_who_knows_the_text_answers_all_and_who_knows_nothing_is_at_chance(text):
    questions = Questions.draw(text, 300, 40, 8)
    found = answer(oracle, questions)
    assert found.accuracy == 1.0 and found.interval[1] == 1.0 and found.interval[0] > 0.98
    constant = answer(lambda ids: torch.zeros(*ids.shape, 256), questions)
    assert constant.accuracy == CHANCE  # all options tie
    guess = torch.Generator().manual_seed(0)
    drawn = answer(lambda ids: torch.randn(*ids.shape, 256, generator=guess), questions)
    assert drawn.interval[0] < CHANCE < drawn.interval[1]
    contrary = answer(lambda ids: -oracle(ids), questions)
    assert contrary.accuracy < 0.02
    assert found.changed(found) == 0 and found.changed(contrary) > 290


def test_a_score_is_the_mean_log_likelihood_of_the_option_alone(text):
    questions = Questions.draw(text, 40, 12, 5)
    table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    found = answer(lambda ids: table[ids], questions)
    log = table.double().log_softmax(1)
    for number, option in ((0, 0), (7, 3), (39, 2)):
        chain = torch.cat([questions.context[number, -1:], questions.options[number, option]])
        right = sum(log[a, b] for a, b in zip(chain[:-1], chain[1:])) / 5
        assert found.scores[number, option].item() == pytest.approx(right.item(), abs=1e-5)


def test_intervals_are_wilsons():
    # From R: prop.test(x, n, correct = FALSE)$conf.int
    assert wilson(50, 100) == pytest.approx((0.403832, 0.596168), abs=1e-6)
    assert wilson(1, 10) == pytest.approx((0.017876, 0.404150), abs=1e-6)
    assert wilson(0, 20) == pytest.approx((0.0, 0.161125), abs=1e-6) and wilson(0, 20)[0] == 0.0
    assert wilson(20, 20) == pytest.approx((0.838875, 1.0), abs=1e-6) and wilson(20, 20)[1] == 1.0
    assert wilson(0, 1)[1] < 1 and wilson(0.25, 1)[0] > 0
    for correct, count in ((-1, 3), (4, 3), (0, 0), (math.nan, 3)):
        with pytest.raises(InputError, match="from 0 to the count"):
            wilson(correct, count)


def test_a_text_is_long_enough_and_varied_enough(text):
    with pytest.raises(InputError, match=r"tokens is \[100\]; 10 questions of 8 and 4 tokens take a text \[120\]"):
        Questions.draw(text[:100], 10, 8, 4)
    with pytest.raises(InputError, match=r"tokens is \[10, 30\]"):
        Questions.draw(text[:300].view(10, 30), 2, 8, 4)
    with pytest.raises(InputError, match=r"10 of 10 questions have no 4 different options of 4 tokens"):
        Questions.draw(torch.zeros(1000, dtype=torch.uint8), 10, 8, 4)
