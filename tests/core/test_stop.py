import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout.core.stop import check_stop, ends_in_repetition
from rollout.request import FinishReason
from rollout.sampling_options import RepetitionDetectionParams

EOS = frozenset({2, 3})
STOPS = frozenset({3, 5})


def verdict(token_id: int, num_output: int = 1, num_tokens: int = 10, min_tokens: int = 0, max_tokens: int = 8):
    return check_stop(token_id, num_output, num_tokens, min_tokens, max_tokens, 20, EOS, STOPS)


@pytest.mark.parametrize(
    ("token_id", "expected"),
    [
        (1, None),
        (2, (FinishReason.STOP, None)),
        (3, (FinishReason.STOP, None)),  # in both sets: EOS
        (5, (FinishReason.STOP, 5)),
    ],
)
def test_every_eos_id_and_stop_id_ends_the_request(token_id: int, expected: object):
    assert verdict(token_id) == expected


@pytest.mark.parametrize("token_id", [2, 5])
def test_the_first_min_tokens_tokens_end_nothing(token_id: int):
    # case ST-03
    # At least 10 tokens, the 11th may stop; the prompt does not count.
    assert verdict(token_id, num_output=10, num_tokens=19, min_tokens=10, max_tokens=12) is None
    assert verdict(token_id, num_output=11, num_tokens=19, min_tokens=10, max_tokens=12) is not None


def test_length_by_max_tokens_and_by_the_model():
    assert verdict(1, num_output=7) is None
    assert verdict(1, num_output=8) == (FinishReason.LENGTH, None)
    assert verdict(1, num_tokens=19) is None
    assert verdict(1, num_tokens=20) == (FinishReason.LENGTH, None)
    assert verdict(2, num_output=8, num_tokens=20) == (FinishReason.STOP, None)  # the last allowed token is EOS
    assert verdict(2, num_output=8, min_tokens=8) == (FinishReason.LENGTH, None)


@given(st.integers(0, 6), st.integers(1, 9), st.integers(0, 9))
def test_what_is_banned_never_stops_and_what_is_not_may(token_id: int, num_output: int, min_tokens: int):
    banned = num_output - 1 < min_tokens  # as `Request.banned_token_ids` says before the draw
    result = check_stop(token_id, num_output, 10, min_tokens, 100, 100, EOS, STOPS)
    assert (result is not None) == (not banned and token_id in EOS | STOPS)


def repeats(output: list[int], smallest: int, largest: int, count: int) -> bool:
    """Some pattern of an allowed size, written `count` times, is how the output ends."""
    for size in range(max(smallest, 1), largest + 1):
        pattern = output[len(output) - size :] if size <= len(output) else []
        written = pattern * count
        if pattern and len(written) <= len(output) and output[len(output) - len(written) :] == written:
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.integers(0, 4),
    st.integers(0, 5),
    st.integers(2, 4),
    st.integers(0, 8),
)
@example([1], [1], 0, 1, 2, 0)  # the prompt does not count
@example([], [0, 1, 0, 1, 0, 1], 2, 2, 3, 0)
def test_repetition_is_found_exactly_where_the_output_ends_in_a_pattern_written_several_times(
    prompt: list[int], output: list[int], smallest: int, more: int, count: int, min_tokens: int
):
    detection = RepetitionDetectionParams(smallest + more, smallest, count)
    found = ends_in_repetition([*prompt, *output], len(output), min_tokens, detection)
    assert found == (len(output) > min_tokens and repeats(output, smallest, smallest + more, count))
