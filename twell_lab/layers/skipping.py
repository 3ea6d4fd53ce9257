"""A linear layer that reads the weights of nonzero inputs alone, for few tokens on a GPU: a zero spares its column of
the weight, which stays the model's own parameter, stored by columns. Zeros come from what stands before, such as the
thresholds of TEAL (Liu et al., arXiv 2408.14690) on the inputs of an attention's projections."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.fx import Graph, Node
from torch.nn.functional import linear

from ..ops import checks, kept_inputs
from . import storage


class SkippingLinear(nn.Linear):
    """A torch.nn.Linear whose zero inputs cost nothing where the kernel `kept_inputs` runs; made by `skip`."""

    def forward(self, input: Tensor) -> Tensor:
        compiling, few = is_dynamo_compiling(), input.is_cuda and 0 < input.shape[:-1].numel() <= kept_inputs.FEW
        plain = few and (compiling or type(input) is Tensor and checks.plain_eager())
        if not plain or input.dtype != self.weight.dtype or checks.needs_gradient(input, self.weight, self.bias):
            return linear(input, self.weight, self.bias)
        if compiling:
            return torch.ops.twell_lab.kept_inputs(input, self.weight, None, self.bias, None, 0.0, None)
        return kept_inputs.operator(input, self.weight, None, self.bias)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        storage.save_contiguous(self, destination, prefix, {})


def skip(module: nn.Linear) -> None:
    """Have a linear layer skip its zero inputs, in place: it stays the same module with the same parameters. One that
    the kernel does not take, or whose weight has to lie as it does, is left as it is."""
    kernel_takes = type(module) is nn.Linear and not (module.in_features % 8 or module.out_features % 8)
    if kernel_takes and not storage.rewrite([module], {"gate": storage.COLUMNS}):
        module.__class__ = SkippingLinear


def stop_skipping(module: nn.Module) -> None:
    """Take `skip` back; another module is left as it is."""
    if type(module) is SkippingLinear:
        module.__class__ = nn.Linear
        storage.restore([module], None)


def join(graph: Graph) -> None:
    """Have a compiled graph compute projections of one input, as queries, keys and values are, in one launch, where
    there is one token: a small one in a launch of its own takes nearly as long as a large one."""
    single, several = torch.ops.twell_lab.kept_inputs.default, torch.ops.twell_lab.kept_inputs_each.default
    groups: dict[str, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=single):
        x, first, second, bias, _, threshold, kind = node.args
        inputs = all(part is None or part.op == "placeholder" for part in (first, bias))  # torch's word for a graph's
        one_token = node.meta["val"].shape[:-1].numel() == 1  # of more, parts of a result would not be contiguous
        if inputs and one_token and second is None and kind is None and not threshold:
            groups.setdefault(_formula(x), []).append(node)
    for nodes in groups.values():
        for i in range(0, len(nodes) - 1, kept_inputs.TOGETHER):
            group = nodes[i : i + kept_inputs.TOGETHER]
            weights, biases = ([node.args[number] for node in group] for number in (1, 3))
            with graph.inserting_before(group[0]):
                joined, end = _added(graph, several, group[0].args[0], weights, biases), 0
                for node in group:
                    begin, end = end, end + node.meta["val"].shape[-1]
                    node.replace_all_uses_with(_added(graph, torch.ops.aten.slice.Tensor, joined, -1, begin, end))
            for node in group:
                graph.erase_node(node)


@cache  # torch.compile compiles anew where an option is another object
def joining() -> object:
    """Return `join` as torch.compile takes it for its option post_grad_custom_pre_pass."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # it takes most of a second

    class Join(CustomGraphPass):
        __call__ = staticmethod(join)

        def uuid(self) -> object:
            return get_hash_for_files((__file__, kept_inputs.__file__))

    return Join()


def _added(graph: Graph, operator: torch._ops.OpOverload, *given) -> Node:
    node = graph.call_function(operator, given)
    node.meta["val"] = operator(*torch.fx.map_arg(given, lambda part: part.meta["val"]))
    return node


def _formula(value: object, steps: int = 4) -> str:
    """Describe how a value of a graph is computed, some steps back. Two with one description are equal: each projection
    cuts their common input by itself."""
    computed = steps and isinstance(value, Node) and value.op == "call_function"
    if not computed or torch.Tag.nondeterministic_seeded in getattr(value.target, "tags", ()):
        return repr(value)
    return f"{value.target}({[_formula(part, steps - 1) for part in value.args]}, {value.kwargs})"
