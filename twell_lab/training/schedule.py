"""What changes from step to step: the learning rate, and the coefficient of the L1 penalty."""

from __future__ import annotations

import math

from .config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate at `step` (from 1): config.lr, times a linear warm-up, times a cosine from 1 down to 0.1."""
    warm = min(1.0, step / config.warmup) if config.warmup else 1.0
    return config.lr * warm * (0.55 + 0.45 * math.cos(math.pi * (step - 1) / config.steps))


def l1_coefficient(config: TrainConfig, step: int) -> float:
    """The penalty's coefficient at `step` (from 1): 0 for l1_delay steps, then a ramp of l1_warmup steps, then l1."""
    after = step - config.l1_delay
    if after <= 0:
        return 0.0
    return config.l1 * min(1.0, after / config.l1_warmup) if config.l1_warmup else config.l1
