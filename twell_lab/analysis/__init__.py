"""The analysers: who fires, what a path costs, and which one a plan picks. May import layers and all below."""
