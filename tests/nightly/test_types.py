"""A user's program is checked against the types of the package: mypy takes a minute for it."""

from importlib.util import find_spec

import pytest

USER = """
import torch
import twell_lab as tl
from twell_lab.training.config import TrainResult

packed = tl.pack(torch.randn(4, 512), tile=256, words=32)
dense: torch.Tensor = packed.to_dense()
result: TrainResult = tl.train(tl.TrainConfig(l1=1e-3, steps=100))
firing: tl.FiringProfile = tl.profile(result.model, [torch.zeros(1, 8, dtype=torch.int64)])
plan: tl.Plan = tl.plan(firing, result.model, tokens=(1, 512))
model: torch.nn.Module = tl.sparsify(result.model, plan)
try:
    tl.densify(model)
except tl.InputError as error:
    print(error.args)
reveal_type(tl.train)
"""
WRONG = USER + 'tl.train("no config")\ntl.sparsified(model)\npacked.to_densee()\n'


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy comes with the test extra")
def test_a_users_program_is_checked_against_our_types(tmp_path):
    """As a type checker sees it: right calls pass, and a wrong argument, name and method are found."""
    from mypy import api

    (tmp_path / "right.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    shared = ["--follow-imports=silent", "--ignore-missing-imports", "--config-file="]
    said, trouble, _ = api.run(
        [*shared, f"--cache-dir={tmp_path / 'kept'}", str(tmp_path / "right.py"), str(tmp_path / "wrong.py")]
    )
    assert not trouble
    right = [line for line in said.splitlines() if "right.py" in line]
    wrong = [line for line in said.splitlines() if "wrong.py" in line and "error" in line]
    assert len(right) == 1 and "TrainResult" in right[0], said  # what reveal_type said
    assert ["[arg-type]" in wrong[0], "sparsified" in wrong[1], "to_densee" in wrong[2]] == [True] * 3, said
    assert len(wrong) == 3
