"""Trees of samples: each shared part once, each drawn token once, and the logprobs of the whole sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import LLM, CompletionOutput, RequestOutput, RolloutTree, SamplingParams
from rollout.tree import PackedTree
from tests.support.oracle import load_reference, reference_logprobs
from tests.support.tiny import make_tiny_llama

PROMPT = [7, 8, 9]


def sample_of(
    token_ids: list[int], index: int, parent: tuple[str, int] | None = None, at: int = 0, num_forced: int = 0
) -> CompletionOutput:
    """A sample whose values are numbers that belong to its tokens and to nothing else."""
    numbers = np.array(token_ids, np.float32)
    return CompletionOutput(
        index=0,
        text="",
        token_ids=token_ids,
        raw_logprobs=-numbers,
        sampled_logprobs=-2 * numbers,
        kept_mass=3 * numbers,
        entropy=4 * numbers,
        finish_reason="length",
        sample_index=index,
        parent=parent,
        branch_position=at,
        num_forced_tokens=num_forced,
    )


def output_of(name: str, *samples: CompletionOutput) -> RequestOutput:
    return RequestOutput(name, None, PROMPT, list(samples))


@pytest.fixture
def small() -> RolloutTree:
    """Two roots; `b` leaves the first after 2 tokens, `c` leaves `b` after 1, `d` goes on at the end of `b`."""
    a = output_of("a", sample_of([10, 11, 12, 13], 0), sample_of([20, 21], 1))
    b = output_of("b", sample_of([10, 11, 30, 31], 2, ("a", 0), 2, num_forced=3))
    c = output_of("c", sample_of([10, 40], 3, ("b", 2), 1))
    d = output_of("d", sample_of([10, 11, 30, 31, 50], 4, ("b", 2), 4), sample_of([10, 11, 30, 31, 60], 5, ("b", 2), 4))
    return RolloutTree.from_outputs([d, c, b, a])


def test_the_parent_is_the_sample_that_has_the_token_before(small: RolloutTree) -> None:
    named = {(node.request_id, node.output.sample_index): index for index, node in enumerate(small.nodes)}
    parents = {name: small.nodes[index].parent for name, index in named.items()}
    assert parents == {
        ("a", 0): None,
        ("a", 1): None,
        ("b", 2): named["a", 0],
        ("c", 3): named["a", 0],  # forked from b, at a token that b has from a
        ("d", 4): named["b", 2],
        ("d", 5): named["b", 2],
    }
    assert all(node.parent is None or node.parent < index for index, node in enumerate(small.nodes))
    assert sorted(named[name] for name in parents if name != ("b", 2)) == small.leaves()
    assert [node.token_ids for node in small.nodes if node.request_id == "b"] == [[30, 31]]


def test_a_packed_tree_has_every_part_once(small: RolloutTree) -> None:
    packed = small.pack()
    tokens = packed.token_ids.tolist()
    assert sorted(tokens) == [7, 8, 9, 10, 11, 12, 13, 20, 21, 30, 31, 40, 50, 60]
    row = {token_id: tokens.index(token_id) for token_id in tokens}
    positions = {token_id: packed.positions[row[token_id]] for token_id in tokens}
    assert positions == {7: 0, 8: 1, 9: 2, 10: 3, 11: 4, 12: 5, 13: 6, 20: 3, 21: 4, 30: 5, 31: 6, 40: 4, 50: 7, 60: 7}
    before = {token_id: packed.predecessors[row[token_id]] for token_id in tokens}
    assert before.pop(7) == -1
    pairs = {8: 7, 9: 8, 10: 9, 11: 10, 12: 11, 13: 12, 20: 9, 21: 20, 30: 11, 31: 30, 40: 10, 50: 31, 60: 31}
    assert {token_id: tokens[place] for token_id, place in before.items()} == pairs
    drawn = {token_id for token_id, counts in zip(tokens, packed.loss_mask, strict=True) if counts}
    assert drawn == {10, 11, 12, 13, 20, 21, 31, 40, 50, 60}  # 30 was forced
    output = packed.positions >= 3
    np.testing.assert_array_equal(packed.raw_logprobs, np.where(output, -packed.token_ids, 0))
    np.testing.assert_array_equal(packed.entropy, np.where(output, 4 * packed.token_ids, 0))
    assert {(segment.start, segment.end) for segment in packed.segments if segment.node == -1} == {(0, 3)}


def test_every_drawn_token_counts_in_one_sequence(small: RolloutTree) -> None:
    sequences = {tuple(sequence.token_ids[3:]): sequence for sequence in small.sequences()}
    counted = {output: sequence.token_ids[sequence.loss_mask].tolist() for output, sequence in sequences.items()}
    assert counted == {
        (10, 11, 12, 13): [10, 11, 12, 13],
        (20, 21): [20, 21],
        (10, 40): [40],
        (10, 11, 30, 31, 50): [31, 50],  # b's token counts in the first sample that goes on at b's end
        (10, 11, 30, 31, 60): [60],
    }
    first = sequences[10, 11, 12, 13]
    assert first.raw_logprobs.tolist() == [0, 0, 0, -10, -11, -12, -13]


def test_what_is_no_tree_is_refused() -> None:
    root = output_of("a", sample_of([10, 11], 0))
    with pytest.raises(ValueError, match="at least one sample"):
        RolloutTree.from_outputs([])
    with pytest.raises(ValueError, match="sample 4 of request 'x' was forked from, and is missing"):
        RolloutTree.from_outputs([root, output_of("b", sample_of([10], 1, ("x", 4), 1))])
    with pytest.raises(ValueError, match="'b' has another prompt"):
        RolloutTree.from_outputs([root, replace(output_of("b", sample_of([10], 1)), prompt_token_ids=[1])])
    with pytest.raises(ValueError, match="sample 0 of request 'a' is there twice"):
        RolloutTree.from_outputs([root, root])
    for at, tokens in ((1, [9]), (3, [10, 11, 12])):
        with pytest.raises(ValueError, match="does not begin with the first"):
            RolloutTree.from_outputs([root, output_of("b", sample_of(tokens, 1, ("a", 0), at))])


@st.composite
def trees(draw: st.DrawFn) -> list[RequestOutput]:
    """Any tree; no token is drawn twice, so that tokens name their places."""
    fresh = iter(range(100, 10_000))
    outputs: list[RequestOutput] = []
    for number in range(draw(st.integers(1, 9))):
        own = [next(fresh) for _ in range(draw(st.integers(0, 4)))]
        if not outputs or draw(st.integers(0, 4)) == 0:
            outputs.append(output_of(str(number), sample_of(own, number)))
            continue
        parent = draw(st.sampled_from(outputs))
        before = parent.outputs[0]
        at = draw(st.integers(0, len(before.token_ids)))
        name = (parent.request_id, before.sample_index)
        outputs.append(output_of(str(number), sample_of([*before.token_ids[:at], *own], number, name, at)))
    return draw(st.permutations(outputs))


@settings(max_examples=150, deadline=None)
@given(trees())
def test_packing_and_counting_hold_for_any_tree(outputs: list[RequestOutput]) -> None:
    tree = RolloutTree.from_outputs(outputs)
    drawn = {token_id for output in outputs for token_id in output.outputs[0].token_ids}
    packed = tree.pack()
    assert sorted(packed.token_ids[packed.loss_mask].tolist()) == sorted(drawn)
    counted = [token_id for sequence in tree.sequences() for token_id in sequence.token_ids[sequence.loss_mask]]
    assert sorted(counted) == sorted(drawn)
    # Every sample can be read along the predecessors, and each of its tokens sees just what stands before it.
    row = {token_id: place for place, token_id in enumerate(packed.token_ids.tolist())}
    mask = packed.attention_mask()
    for output in outputs:
        whole = [*PROMPT, *output.outputs[0].token_ids]
        for count, token_id in enumerate(whole):
            assert {int(place) for place in packed.token_ids[mask[row[token_id]]]} == set(whole[: count + 1])
            assert packed.predecessors[row[token_id]] == (row[whole[count - 1]] if count else -1)
            assert packed.positions[row[token_id]] == count


def packed_logprobs(folder: Path, packed: PackedTree) -> np.ndarray:
    """transformers' logprobs of the packed tokens after the first, with tree attention."""
    model = load_reference(folder)
    bias = torch.where(torch.from_numpy(packed.attention_mask()), 0.0, torch.finfo(torch.float32).min)
    ids, positions = (torch.from_numpy(array)[None] for array in (packed.token_ids, packed.positions))
    with torch.no_grad():
        logits = model(ids, attention_mask=bias[None, None], position_ids=positions, use_cache=False).logits[0]
    rows = torch.log_softmax(logits, -1)[packed.predecessors[1:]]
    return rows.gather(1, ids[0, 1:, None])[:, 0].numpy()


def test_a_packed_tree_has_the_logprobs_of_its_sequences(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, near_uniform=True)
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4)
    params = SamplingParams(n=2, max_tokens=14, seed=3, ignore_eos=True)
    (root,) = llm.enqueue([5, 6, 7, 8, 9], params)
    for _ in range(7):
        llm.step()
    first = llm.fork(root, 4, 2)
    for _ in range(6):
        llm.step()
    llm.fork(first, sample=1)
    llm.fork(first, 2)
    outputs = llm.wait_for_completion()
    tree = RolloutTree.from_outputs(outputs)
    packed = tree.pack()
    scores = np.append(0, packed_logprobs(folder, packed))
    reference = load_reference(folder)
    for sequence in tree.sequences():
        logprobs = reference_logprobs(reference, sequence.token_ids.tolist())[:-1].numpy()
        alone = logprobs[np.arange(len(logprobs)), sequence.token_ids[1:]]
        # The rows of the packed tree that this sequence is made of, found backwards from its own last token.
        (place,) = [row for row in range(len(scores)) if _reads(packed, row) == sequence.token_ids.tolist()]
        rows = []
        while place >= 0:
            rows.append(place)
            place = int(packed.predecessors[place])
        np.testing.assert_allclose(scores[rows[::-1]][1:], alone, atol=2e-5)
        np.testing.assert_allclose(sequence.raw_logprobs[5:], alone[4:], atol=1e-4)
    np.testing.assert_allclose(packed.raw_logprobs[5:], scores[5:], atol=1e-4)
    assert packed.loss_mask.sum() == sum(len(node.token_ids) for node in tree.nodes)


def _reads(packed: PackedTree, row: int) -> list[int]:
    """The sequence that ends in a row of a packed tree."""
    tokens = []
    while row >= 0:
        tokens.append(int(packed.token_ids[row]))
        row = int(packed.predecessors[row])
    return tokens[::-1]
