"""L1 training of small language models: configuration, loop, checkpoints. May import models and all below."""
