"""When a request ends because of the token it just got: pure functions of integers."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from rollout.request import FinishReason

NOT_A_TOKEN = -1  # what the sampler returns where the logits were not numbers

Verdict = tuple[FinishReason, int | None]  # reason and stop_reason: the stop token id, None for EOS and length


def check_stop(
    token_id: int,
    num_output_tokens: int,
    num_tokens: int,
    min_tokens: int,
    max_tokens: int,
    max_model_len: int,
    eos_token_ids: AbstractSet[int],
    stop_token_ids: AbstractSet[int],
) -> Verdict | None:
    """Why a request ends with `token_id`, or None. Both counts include that token.

    The first `min_tokens` tokens end nothing (they are drawn with these ids banned), except through length.
    EOS goes before stop ids, and both go before length: a request whose last allowed token is EOS has stopped.
    """
    if num_output_tokens > min_tokens:
        if token_id in eos_token_ids:
            return FinishReason.STOP, None
        if token_id in stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output_tokens >= max_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None
