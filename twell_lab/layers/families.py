"""The families of models whose feed-forward layers are known: a table of where each keeps the parts of one. What is not
in it is added by `register_family`; what a new line needs beside it, CONTRIBUTING.md says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..core import InputError


@dataclass(frozen=True)
class Family:
    """Where the parts of a feed-forward layer are, in the families of models that call them so. A hint only: a module
    with these parts is run beside their formula before it is swapped (twell_lab.layers.probe).

    models: who has such layers, as messages list them. up, down, activation, gate: the places of the parts in the
    module, such as "fc1" or "output.dense"; gate is None in plain layers, and the same as up where one projection holds
    both, the gate's rows first. Projections are plain torch.nn.Linear, transformers' Conv1D or FalconLinear. inside:
    the module stays and its activation is swapped, since more is done in it; for plain layers alone. residual: the
    module's forward needs a second argument, rows like the first, which it adds. dropout: the place of a
    torch.nn.Dropout before the down projection. InputError for a family that cannot be."""

    models: str
    up: str
    down: str
    activation: str
    gate: str | None = None
    inside: bool = False
    residual: bool = False
    dropout: str | None = None

    def __post_init__(self) -> None:
        optional = [place for place in (self.gate, self.dropout) if place is not None]
        names = self.models, self.up, self.down, self.activation, *optional
        named = all(isinstance(name, str) and name for name in names)
        apart = len({*names[1:4]}) == 3 and self.gate not in names[2:4]
        if not (named and apart and not (optional if self.inside else "." in "".join(self.places))):
            raise InputError(
                f"{self} cannot be; accepted: names such as 'fc1', two alike for gate and up alone; either "
                "inside=True, for plain layers without dropout, or no place within a part"
            )

    @property
    def projections(self) -> tuple[str, ...]:
        """The places of the projections, each once."""
        return tuple(dict.fromkeys(place for place in (self.gate, self.up, self.down) if place))

    @property
    def places(self) -> tuple[str, ...]:
        """The places of all parts, each once."""
        return (*self.projections, self.activation)


_inside = partial(Family, inside=True)

# The first whose parts are all there is taken, so a gated layer stands before a plain one of the same names.
FAMILIES: list[Family] = [
    # Mistral, Qwen, Gemma, OLMo, Granite and many others copied Llama's layer; so are shared experts built.
    Family("Llama", "up_proj", "down_proj", "act_fn", "gate_proj"),
    Family("Llama 4", "up_proj", "down_proj", "activation_fn", "gate_proj"),
    Family("Nemotron", "up_proj", "down_proj", "act_fn"),  # Arcee, and this course's plain layers
    _inside("MPT", "up_proj", "down_proj", "act", residual=True),
    _inside("OPT", "fc1", "fc2", "activation_fn"),  # BART beside its attention; Phi, CLIP and ViT in a module
    Family("Phi-3", "gate_up_proj", "down_proj", "activation_fn", "gate_up_proj"),  # GLM-4, Dia
    Family("ModernBERT", "Wi", "Wo", "act", "Wi", dropout="drop"),
    Family("Granite MoE", "input_linear", "output_linear", "activation", "input_linear"),
    _inside("GPT-2", "c_fc", "c_proj", "act"),  # Conv1D; GPT-Neo, GPT-BigCode and StarCoder2 with nn.Linear
    _inside("GPT-J", "fc_in", "fc_out", "act"),  # CodeGen
    Family("GPT-NeoX and Falcon", "dense_h_to_4h", "dense_4h_to_h", "act"),  # Pythia, Persimmon
    _inside("Bloom", "dense_h_to_4h", "dense_4h_to_h", "gelu_impl", residual=True),
    Family("gated T5", "wi_1", "wo", "act", "wi_0", dropout="dropout"),
    Family("T5", "wi", "wo", "act", dropout="dropout"),
    _inside("BERT", "intermediate.dense", "output.dense", "intermediate.intermediate_act_fn"),
    _inside("ALBERT", "ffn", "ffn_output", "activation"),
    _inside("DistilBERT", "lin1", "lin2", "activation"),
    _inside("SAM", "lin1", "lin2", "act"),
    _inside("Qwen-VL", "linear_fc1", "linear_fc2", "act_fn"),
    _inside("Wav2Vec2", "intermediate_dense", "output_dense", "intermediate_act_fn"),
]


def register_family(family: Family) -> Family:
    """Have `feed_forwards`, `sparsify`, `profile` and all others know the layers of one more family; returns it.

        Family = twell_lab.layers.families.Family
        twell_lab.register_family(Family("MyModel", gate="w1", up="w3", down="w2", activation="act"))

    It is asked before those that were there, in this process alone. InputError for anything but a Family."""
    if not isinstance(family, Family):
        raise InputError(f"family is a {type(family).__name__}; a twell_lab.layers.families.Family is accepted")
    if family not in FAMILIES:
        FAMILIES.insert(0, family)
    return family


def accepted() -> str:
    """Return what a message says of a module that is no feed-forward layer known here."""
    names = ", ".join(dict.fromkeys(family.models for family in FAMILIES))
    return (
        f"accepted: layers built like those of {names}, with a ReLU, and projections that are each a plain "
        "torch.nn.Linear (or Conv1D); others by twell_lab.register_family"
    )
