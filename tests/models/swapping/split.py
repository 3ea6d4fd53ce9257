"""Models that transformers' tensor parallelism splits over processes, swapped beside what they gave before.

    torchrun --nproc-per-node=2 tests/models/swapping/split.py cpu|cuda [FOLDER]

FOLDER: a saved model, which is loaded with tp_plan="auto", too. Each process prints the names of what it compared."""

import copy
import os
import sys
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel

import twell_lab as tl
from tests.models.swapping.spread import llama, loud, off
from twell_lab.core import InputError
from twell_lab.layers.sparse_ffn import SparseFFN

# Neurons that two processes hold unequal numbers of, where transformers itself trains such a layer (5.17 does not).
WIDTH = 81 if hasattr(ColwiseParallel, "_from_local_last_dim_shard") else 82
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)


def neox():
    config = transformers.GPTNeoXConfig(**SIZES, intermediate_size=600, hidden_act="relu")
    return transformers.GPTNeoXForCausalLM(config).eval()


def nemotron():
    config = transformers.NemotronConfig(**SIZES, intermediate_size=WIDTH, num_key_value_heads=2, hidden_act="relu2")
    return transformers.NemotronForCausalLM(config).eval()


def phi3():
    more = dict(intermediate_size=80, num_key_value_heads=2, hidden_act="relu", pad_token_id=0)
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, **more)).eval()


MODELS = {
    "llama": llama,
    "llama with biases": lambda: llama(intermediate_size=WIDTH, mlp_bias=True),
    "neox": neox,
    "nemotron": nemotron,
}


def split(model, mesh, only=""):
    """The model, split by its own plan, as tp_plan="auto" does in each release of transformers; only: names that end
    so."""
    for pattern, kind in model.tp_plan.items():
        style = ALL_PARALLEL_STYLES[kind]
        for name, module in model.named_modules():
            if "lm_head" not in name and fnmatchcase(name, f"*{pattern}") and name.endswith(only):
                for key in [each for each, p in module._parameters.items() if p is not None]:
                    style.validate_param(module, key, mesh, parameter_name=f"{name}.{key}")
                    style.shard_param(module, key, mesh)
                style.install_forward(module, mesh)
    for module in model.modules():
        module._is_hooked = True  # transformers 5.17 marks all, 5.23 those that it split
    return model


@torch.no_grad()
def logits(model, tokens, **how):
    return model(tokens, **how).logits


def compare(name, model, tokens, whole=None):
    """The split model swapped, beside itself before, and beside the whole one."""
    exact, device = dict(rtol=0, atol=0), tokens.device.type
    near = exact if device == "cpu" else {}
    dense, names = logits(model, tokens), list(model.state_dict())
    if whole is not None:
        torch.testing.assert_close(dense, whole)
    said = model.generate(tokens[:1], max_new_tokens=6, do_sample=False)
    model(tokens).logits.float().pow(2).sum().backward()
    gradients = {key: p.grad.to_local().clone() for key, p in model.named_parameters() if hasattr(p.grad, "to_local")}
    for plan in ("twell", "dense", None):
        model.zero_grad()
        tl.sparsify(model, plan)
        layers = [each for each in model.modules() if isinstance(each, SparseFFN)]
        assert len(layers) == 2
        assert all(each.up.weight.shape[0] < model.config.intermediate_size for each in layers)
        for _ in range(10):  # enough for layers that decide by themselves
            found = logits(model, tokens)
        torch.testing.assert_close(found, dense, **near)
        with torch.inference_mode():
            torch.testing.assert_close(model(tokens).logits, dense, **near)
        if plan == "twell":
            torch.compiler.reset()
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            torch.testing.assert_close(logits(compiled, tokens, use_cache=False), dense, **near)
        assert torch.equal(model.generate(tokens[:1], max_new_tokens=6, do_sample=False), said)
        assert list(model.state_dict()) == names
        model(tokens).logits.float().pow(2).sum().backward()
        for key, p in model.named_parameters():
            if key in gradients:
                torch.testing.assert_close(p.grad.to_local(), gradients[key])
        tl.densify(model)
        assert torch.equal(logits(model, tokens), dense)
    tl.sparsify(model, "twell")
    logits(model, tokens)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    changed = logits(model, tokens)
    torch.testing.assert_close(changed, logits(tl.densify(model), tokens), **near)
    assert not torch.equal(changed, dense)
    say(f"{name} compared")


def compare_in_16_bits(name, model, tokens, whole):
    """As `compare`, in the dtype that the kernels take: no further from what the whole model gives in float32 than the
    dense layers are, but for a tenth."""
    dense, said = logits(model, tokens), model.generate(tokens[:1], max_new_tokens=6, do_sample=False)
    for plan in ("twell", None):
        tl.sparsify(model, plan)
        for _ in range(10):
            found = logits(model, tokens)
        assert 0 < off(dense, whole) < 0.1 and off(found, whole) <= 1.1 * off(dense, whole), (name, plan)
        assert model.generate(tokens[:1], max_new_tokens=6, do_sample=False).shape == said.shape
        tl.densify(model)
        assert torch.equal(logits(model, tokens), dense)
    say(f"{name} compared in 16 bits")


def say(line):
    os.write(1, f"{line}\n".encode())  # at once, so that no other process writes between


def main(device, folder=None):
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    tokens = torch.arange(36, device=device).view(3, 12)
    for name, make in MODELS.items():
        if not any(".mlp." in each for each in make().tp_plan):  # of Nemotron, before transformers 5.23
            say(f"{name} is not split by transformers")
            continue
        torch.manual_seed(0)
        model = loud(make()).to(device)
        whole, halved = logits(model, tokens), copy.deepcopy(model).to(torch.bfloat16)
        compare(name, split(model, mesh), tokens, whole)
        compare_in_16_bits(name, split(halved, mesh), tokens, whole)
    model = split(phi3().to(device), mesh)
    try:
        tl.sparsify(model)
    except InputError as error:
        assert "gate_up_proj is split over processes" in str(error) and "without tp_plan" in str(error), error
        say("phi3 refused")
    if folder is not None:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
        compare("tp_plan", loaded, tokens)


def split_report(printed):
    """What the two processes said, sorted, once each; they must have said the same."""
    lines = sorted(line for line in printed.splitlines() if line)
    assert lines[::2] == lines[1::2], printed
    return lines[::2]


def expected(folders):
    """What each is to have said. folders: given to it, none or one."""
    names = ["llama", "llama with biases", "neox", "nemotron"]
    said = {name: [f"{name} compared", f"{name} compared in 16 bits"] for name in names}
    if not any(".mlp." in each for each in nemotron().tp_plan):  # before transformers 5.23
        said["nemotron"] = ["nemotron is not split by transformers"]
    return sorted([*sum(said.values(), []), "phi3 refused", *(["tp_plan compared"] if folders else [])])


if __name__ == "__main__":
    dist.init_process_group("gloo" if sys.argv[1] == "cpu" else "nccl")
    main(*sys.argv[1:])
    dist.destroy_process_group()
