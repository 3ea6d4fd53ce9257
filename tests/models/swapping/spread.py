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


def spread(model, first, second, **how):
    """The model with its second layer on another device than all else, by accelerate's hooks."""
    import accelerate

    inside = model.model.decoder if hasattr(model.model, "decoder") else model.model
    names = {id(module): name for name, module in model.named_modules()}
    devices = {names[id(module)]: first for module in inside.children() if module is not inside.layers}
    devices |= {names[id(inside.layers[0])]: first, names[id(inside.layers[1])]: second, "lm_head": first}
    return accelerate.dispatch_model(model, devices, force_hooks=True, **how)
