"""When a request ends because of the token it just got: pure functions of integers."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from rollout.request import FinishReason
from rollout.sampling_options import RepetitionDetectionParams

NOT_A_TOKEN = -1  # what the sampler returns where the logits were not numbers
REPETITION_DETECTED = "repetition_detected"  # the stop reason that vLLM gives

Verdict = tuple[FinishReason, int | str | None]  # reason and stop_reason: the stop token id, None for EOS and length


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


def ends_in_repetition(
    token_ids: Sequence[int], num_output_tokens: int, min_tokens: int, detection: RepetitionDetectionParams
) -> bool:
    """Whether the output, the last `num_output_tokens` of `token_ids`, ends in one pattern `min_count` times in a row.

    Like every other reason to stop it counts only after the first `min_tokens` tokens; those may be in the pattern.
    Only the tail is looked at, and of that mostly one token for each size of a pattern: tokens repeat with a period of
    `size` over `size * min_count` tokens exactly where each of them equals the one `size` before it.
    """
    if num_output_tokens <= min_tokens:
        return False
    last = token_ids[-1]
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        span = size * detection.min_count
        if span > num_output_tokens:
            return False
        if token_ids[-1 - size] == last:
            tail = token_ids[-span:]
            if tail[size:] == tail[:-size]:
                return True
    return False
