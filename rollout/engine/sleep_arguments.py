"""What `sleep` and `wake_up` take, wherever the engine runs."""

from __future__ import annotations

from collections.abc import Iterable

from rollout.config import EngineConfig
from rollout.weights.target import IN_FLIGHT_MODES

TAGS = ("scheduling", "weights", "kv_cache", "graphs")
_NO_TAG = "the drafter's weights wake with 'weights', its KV pool with 'kv_cache', its recorded steps with 'graphs'"


def check_tags(tags: Iterable[str] | None, config: EngineConfig) -> list[str]:
    """The wake-up tags that are meant: all of them by None, one by a string. Raises `ValueError` for an unknown one."""
    if isinstance(tags, str):
        tags = [tags]
    tags = list(TAGS if tags is None else tags)
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown:
        why = ""
        if "drafter" in unknown:
            speculative = config.speculative_config
            has_drafter = speculative is not None and speculative.has_weights
            why = f" ({_NO_TAG if has_drafter else 'this engine has no drafter'})"
        raise ValueError(f"tags={tags!r} is not valid{why}: they must be among {', '.join(map(repr, TAGS))}")
    return tags


def check_sleep(level: int, mode: str) -> None:
    """Raises `ValueError` for arguments that `sleep` does not take."""
    if isinstance(level, bool) or not isinstance(level, int) or level not in (0, 1, 2):
        raise ValueError(f"level={level!r} is not valid: it must be 0 (stop), 1 (KV pool) or 2 (weights too)")
    if mode not in IN_FLIGHT_MODES:
        raise ValueError(f"mode={mode!r} is not valid: it must be one of {', '.join(IN_FLIGHT_MODES)}")
    if mode == "keep" and level > 0:
        raise ValueError(
            f"mode='keep' is not valid at level={level}, which gives the KV back: use 'recompute', which lets "
            "requests compute it anew afterwards, or level=0"
        )
