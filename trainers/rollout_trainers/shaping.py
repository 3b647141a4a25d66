"""What is taken from rewards for completions that come near the length limit."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: float, penalty: float) -> float:
    """The soft punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13): what to add to a reward, never
    above 0.

    Zero up to `(1 - buffer) * max_tokens`; from there it falls linearly, and is `-penalty` at `max_tokens`. `buffer` is
    a share of `max_tokens`; with 0 nothing is punished.
    """
    allowance = buffer * max_tokens
    excess = num_tokens - (max_tokens - allowance)
    if allowance == 0 or excess <= 0:
        return 0.0
    return -penalty * min(1.0, excess / allowance)
