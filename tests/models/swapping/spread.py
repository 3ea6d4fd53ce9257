"""Small models of transformers, each with two layers, and how to spread them over two devices."""


def llama(**changes):
    import transformers

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(**{**sizes, "num_key_value_heads": 2, "hidden_act": "relu", **changes})
    return transformers.LlamaForCausalLM(config).eval()


def opt():
    import transformers

    sizes = dict(vocab_size=64, hidden_size=16, word_embed_proj_dim=16, ffn_dim=40, num_hidden_layers=2)
    more = dict(num_attention_heads=2, max_position_embeddings=64, activation_function="relu", dropout=0.0)
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **more)).eval()


MODELS = {"llama": llama, "opt": opt}


def loud(model):
    """The model with feed-forward layers that its logits depend on: as drawn, they add a hundredth to what goes by."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and any(part in name for part in (".mlp.", ".fc1.", ".fc2.")):
                weight.mul_(8)
    return model


def off(found, exact):
    """How far logits are from exact ones, as a share of these."""
    return float((found.double().cpu() - exact.double().cpu()).norm() / exact.double().cpu().norm())


def places(model, first, second):
    """A device_map: the second layer on another device than all else."""
    inside = model.model.decoder if hasattr(model.model, "decoder") else model.model
    names = {id(module): name for name, module in model.named_modules()}
    devices = {names[id(module)]: first for module in inside.children() if module is not inside.layers}
    return devices | {names[id(inside.layers[0])]: first, names[id(inside.layers[1])]: second, "lm_head": first}


def spread(model, first, second, **how):
    """The model spread over two devices (places), by accelerate's hooks."""
    import accelerate

    return accelerate.dispatch_model(model, places(model, first, second), force_hooks=True, **how)
