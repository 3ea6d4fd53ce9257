"""The families of decoders that the ordinary tests of `tl.generate` leave out: the same tests."""

import pytest

from tests.models.speaking import decoders
from tests.models.speaking import test_generate as ordinary
from tests.models.speaking.test_generate import loop  # noqa: F401

OTHERS = [name for name in decoders.FAMILIES if name not in ordinary.FAMILIES]


@pytest.mark.parametrize("name", OTHERS)
def test_a_family_says_what_its_own_generate_says(loop, name):  # noqa: F811
    ordinary.test_a_family_says_what_its_own_generate_says(loop, name)


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in decoders.NO_POSITIONS])
def test_a_step_of_a_family_is_one_graph_to_the_compiler(loop, name):  # noqa: F811
    ordinary.test_a_step_of_a_family_is_one_graph_to_the_compiler(loop, name)
