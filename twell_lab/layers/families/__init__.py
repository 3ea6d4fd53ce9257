"""The families of models whose feed-forward layers are known: one small file for those that are built alike. What is
not known here is added by `register_family`."""

from __future__ import annotations

from ...core import InputError
from . import bert, bloom, gpt2, llama, nemotron, neox, opt, phi3, t5, vit
from .family import Family

# The first whose parts are all there is taken, so a gated layer stands before a plain one of the same names.
families: list[Family] = [
    family for file in (llama, nemotron, opt, phi3, gpt2, neox, bloom, t5, bert, vit) for family in file.FAMILIES
]


def known() -> tuple[Family, ...]:
    """The families, in the order in which a module is compared with them."""
    return tuple(families)


def register_family(family: Family) -> Family:
    """Have `feed_forwards`, `sparsify`, `profile` and all others know the layers of one more family; returns it.

        Family = twell_lab.layers.families.Family
        twell_lab.register_family(Family("MyModel", gate="w1", up="w3", down="w2", activation="act"))

    It is asked before those that were there. For this process alone; a second call with the same family changes
    nothing. Raises InputError for anything but a Family.
    """
    if not isinstance(family, Family):
        raise InputError(f"family is a {type(family).__name__}; a twell_lab.layers.families.Family is accepted")
    if family not in families:
        families.insert(0, family)
    return family


def accepted() -> str:
    """The end of a message about a module that is no feed-forward layer known here."""
    names = ", ".join(dict.fromkeys(family.models for family in known()))
    return (
        f"accepted: layers built like those of {names}, with a ReLU, and projections that are each a plain "
        "torch.nn.Linear (or Conv1D); others by twell_lab.register_family"
    )
