"""Seeds. A draw's noise is a pure function of (seed, sample index, position, token id); no generator has a state.

The function itself is part of the sampling kernel (`rollout_kernels.sample`), so that the reference and every device
agree on it bit for bit.
"""

from __future__ import annotations

_MASK = 2**64 - 1


def derive_seed(engine_seed: int, number: int) -> int:
    """The seed of the engine's request `number`, in [0, 2^63): two rounds of SplitMix64 (Steele et al., 2014)."""
    return _split_mix(_split_mix(engine_seed) ^ number) >> 1


def _split_mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
