"""Every folded answer in Python with one slip in it, of each kind, at each place: its check refuses it.

SAME lists those that are as right."""

import ast
import signal

import pytest
import torch

import twell_lab
from tests.notebooks.test_exercises import handed_out
from twell_lab.course import exercises, packing

TWINS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Add, ast.Sub), (ast.And, ast.Or)]
SWAPPED = {**dict(TWINS), **{b: a for a, b in TWINS}, ast.Mult: ast.Add, ast.FloorDiv: ast.Div, ast.Div: ast.Mult}
NAMES = {"max": "min", "min": "max", "any": "all", "all": "any", "gt": "ge"}
NAMES |= {"clamp": "abs", "relu": "abs", "abs": "clone"}


def slips(node: ast.AST):
    """Yield a function that makes the slip, for each slip that is possible at a node."""
    for field in ("op", "ops"):
        operators = getattr(node, field, None)
        operator = operators[0] if isinstance(operators, list) else operators
        if type(operator) in SWAPPED:
            new = SWAPPED[type(operator)]()
            yield lambda: setattr(node, field, [new, *operators[1:]] if isinstance(operators, list) else new)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield lambda: setattr(node, "value", node.value + 1 if type(node.value) is int else 2 * node.value)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda: setattr(node, "value", not node.value)
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield lambda: setattr(node, "id", NAMES[node.id])
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield lambda: setattr(node, "attr", NAMES[node.attr])
    if isinstance(node, ast.IfExp):
        yield lambda: setattr(node, "body", node.orelse)
        yield lambda: setattr(node, "orelse", node.body)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield lambda: setattr(node, "op", ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not())
    if isinstance(node, ast.Call) and node.keywords:
        yield lambda: node.keywords.pop()
    if isinstance(node, ast.Slice) and node.lower:
        yield lambda: setattr(node, "lower", None)
    if isinstance(node, ast.Slice) and node.upper:
        yield lambda: setattr(node, "upper", None)


def mutants(answer: str) -> list[str]:
    """Return the answer with one slip, for each slip at each place."""
    found, number = [], 0
    while True:
        tree = ast.parse(answer)
        options = [slip for node in ast.walk(tree) for slip in slips(node)]
        if number == len(options):
            return found
        options[number]()
        found.append(ast.unparse(tree))
        number += 1


def stopped(*_):
    raise TimeoutError("the answer took longer than 5 seconds")


def passes(name: str, given: str, answer: str, function: str, capsys) -> bool:
    space = {"torch": torch, "tl": twell_lab, "exercises": exercises, "packing": packing}
    exec(given, space)
    signal.signal(signal.SIGALRM, stopped)
    signal.alarm(5)
    try:
        exec(answer, space)
        capsys.readouterr()
        exercises.check(name, space[function])
    except Exception:
        return False
    finally:
        signal.alarm(0)
    return capsys.readouterr().out.startswith(exercises.RIGHT)


# Exercise: parts of lines whose slips are as right: sizes that the reader chooses, bounds that nothing comes to, ties that
# rounding decides or that the exercise leaves open.
SAME = {
    "may_be_skipped": ["torch.arange(0, 2"],
    "agrees": ["torch.randn(2", "torch.randn(30, 11)", "<= 0.01"],
    "quantise_row": ["clamp(min=2e-30)"],
    "seed_verdict": ["run >= base"],
    "cut_token": ["activation.abs() > threshold"],
    "lossless": ["torch.nan", "packing.one_tile"],
    "without_padding": ["rows.shape[+1]"],
    "read_word": ["word & 4294901761"],
    "row_sectors": ["d_model - 2"],
    "floor_bytes": ["// 33"],
    "must_stay": ["error.max() >", "scale * torch.randn"],
    "cut_or_train": ["<="],
}
CODE = [name for name, (_, answer, function) in handed_out().items() if f"def {function}" in answer]


@pytest.mark.parametrize("name", CODE)
def test_no_slip_passes(name, capsys):
    given, answer, function = handed_out()[name]
    right = ast.unparse(ast.parse(answer)).splitlines()
    survivors = []
    for mutant in mutants(answer):
        if passes(name, given, mutant, function, capsys):
            changed = [line.strip() for line, before in zip(mutant.splitlines(), right, strict=True) if line != before]
            survivors += changed
    left = [line for line in survivors if not any(part in line for part in SAME.get(name, ()))]
    assert not left, f"{len(mutants(answer))} slips; these pass: {left}"
