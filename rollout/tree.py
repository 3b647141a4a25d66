"""Trees of samples: forks with the samples that they left, for trainers. Shared parts stand once.

tree = RolloutTree.from_outputs(outputs)     # the roots and their forks, in any order
packed = tree.pack()                         # one sequence for tree attention
sequences = tree.sequences()                 # or one a leaf, for trainers without it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rollout.outputs import CompletionOutput, RequestOutput, check_whole, outputs_each

_ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One sample: `output` is all of it, its own are the tokens from `branch_position` on.

    `parent` is the index of the node that has the token before its own ones; None where that is the prompt. Where a
    fork was made of tokens that its parent had from another sample, that one is the parent here.
    """

    request_id: str
    parent: int | None
    branch_position: int  # output tokens before its own
    output: CompletionOutput

    @property
    def end(self) -> int:
        """Output tokens up to its end, those of its ancestors included."""
        return len(self.output.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Its own tokens."""
        return self.output.token_ids[self.branch_position :]

    @property
    def sampled(self) -> range:
        """Output positions of the tokens that it has drawn: its own ones without those that were forced."""
        return range(min(max(self.branch_position, self.output.num_forced_tokens), self.end), self.end)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens without a branch in it: rows `start` to `end` of a packed tree. `parent` is the segment that it
    follows, -1 for the prompt, which is segment 0. `node` is the sample that it belongs to, -1 for the prompt."""

    node: int
    parent: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedTree:
    """A tree as one sequence of T tokens, each shared part once, a segment after the segment that it follows.

    `token_ids`, `positions` (in the sequence of its sample, from the prompt's first token on) and `segment_ids`: int64
    [T]. `predecessors`: int64 [T], the row whose hidden state predicts the token, -1 for the first. `loss_mask`: bool
    [T], true for the tokens that a sample has drawn. The other arrays: float32 [T], what the sampler said of each
    output token, 0 for the prompt.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    segments: list[Segment]
    segment_ids: np.ndarray
    predecessors: np.ndarray
    loss_mask: np.ndarray
    raw_logprobs: np.ndarray
    sampled_logprobs: np.ndarray
    kept_mass: np.ndarray
    entropy: np.ndarray

    def ancestors(self) -> np.ndarray:
        """bool [S, S]: whether segment j is segment i, or one that it follows, directly or not."""
        table = np.eye(len(self.segments), dtype=bool)
        for index, segment in enumerate(self.segments):
            if segment.parent >= 0:
                table[index] |= table[segment.parent]
        return table

    def attention_mask(self) -> np.ndarray:
        """bool [T, T]: whether token i may see token j."""
        seen = self.ancestors()[self.segment_ids[:, None], self.segment_ids[None, :]]
        return seen & (np.arange(len(self.token_ids))[None, :] <= np.arange(len(self.token_ids))[:, None])


@dataclass(frozen=True, slots=True)
class TreeSequence:
    """A whole sample, prompt and output: arrays of L values. `loss_mask` is true for the tokens that count here.

    `node` is the sample. The logprobs and entropies are 0 for the prompt.
    """

    node: int
    token_ids: np.ndarray  # int64
    loss_mask: np.ndarray  # bool
    raw_logprobs: np.ndarray  # float32, as the following
    sampled_logprobs: np.ndarray
    kept_mass: np.ndarray
    entropy: np.ndarray


@dataclass(frozen=True, slots=True)
class RolloutTree:
    """The samples of one prompt and their forks; parents stand before their children."""

    prompt_token_ids: list[int]
    nodes: list[TreeNode]

    @classmethod
    def from_outputs(cls, outputs: RequestOutput | Iterable[RequestOutput]) -> RolloutTree:
        """The tree of all samples of `outputs`: roots and forks, in any order.

        Raises `ValueError` where prompts differ, a sample is there twice, or one that was forked from is missing, and
        for deltas.
        """
        outputs = outputs_each(outputs)
        if not outputs:
            raise ValueError("outputs=[] is not valid: a tree has at least one sample")
        prompt = list(outputs[0].prompt_token_ids)
        waiting: dict[tuple[str, int], CompletionOutput] = {}
        for output in outputs:
            check_whole(output, f"the output of request {output.request_id!r}")
            if list(output.prompt_token_ids) != prompt:
                raise ValueError(f"request {output.request_id!r} has another prompt: a tree has one")
            for sample in output.outputs:
                name = (output.request_id, sample.sample_index)
                if name in waiting:
                    raise ValueError(f"sample {name[1]} of request {name[0]!r} is there twice")
                waiting[name] = sample
        nodes: list[TreeNode] = []
        places: dict[tuple[str, int], int] = {}
        for name in _parents_first(waiting):
            places[name] = len(nodes)
            nodes.append(_node(name[0], waiting[name], places, nodes))
        return cls(prompt, nodes)

    def children(self, node: int) -> list[int]:
        """The nodes that branch off a node's own tokens, or go on at their end."""
        return [index for index, other in enumerate(self.nodes) if other.parent == node]

    def leaves(self) -> list[int]:
        """The samples at whose end no other goes on."""
        heirs = self._heirs()
        return [index for index in range(len(self.nodes)) if index not in heirs]

    def pack(self) -> PackedTree:
        """The tree as one sequence, each shared part once."""
        num_prompt = len(self.prompt_token_ids)
        cuts: list[set[int]] = [{node.end} for node in self.nodes]  # where segments end, in output tokens
        for node in self.nodes:
            if node.parent is not None:
                cuts[node.parent].add(node.branch_position)
        segments = [Segment(-1, -1, 0, num_prompt)]
        first_positions = [0]
        ending: dict[tuple[int, int], int] = {}  # (node, output position) -> the segment that ends there
        for index, node in enumerate(self.nodes):
            parent = 0 if node.parent is None else ending[node.parent, node.branch_position]
            start = node.branch_position
            ending[index, start] = parent
            for end in sorted(cut for cut in cuts[index] if cut > start):
                row = segments[-1].end
                segments.append(Segment(index, parent, row, row + end - start))
                first_positions.append(num_prompt + start)
                parent = ending[index, end] = len(segments) - 1
                start = end
        return self._fill(segments, first_positions)

    def sequences(self) -> list[TreeSequence]:
        """A sequence for each leaf, in which every token that was drawn counts once over the whole tree.

        A token counts in the sequence of the sample that drew it. Where that is no leaf, since others go on at its end,
        it counts in that of the first of these (which may have an heir in turn).
        """
        heirs = self._heirs()
        counted: dict[int, list[range]] = {leaf: [] for leaf in self.leaves()}
        for index, node in enumerate(self.nodes):
            leaf = index
            while leaf in heirs:
                leaf = heirs[leaf]
            counted[leaf].append(node.sampled)
        num_prompt = len(self.prompt_token_ids)
        sequences = []
        for leaf, ranges in counted.items():
            output = self.nodes[leaf].output
            mask = np.zeros(num_prompt + len(output.token_ids), bool)
            for positions in ranges:
                mask[num_prompt + positions.start : num_prompt + positions.stop] = True
            arrays = {name: np.append(np.zeros(num_prompt, np.float32), getattr(output, name)) for name in _ARRAYS}
            token_ids = np.array([*self.prompt_token_ids, *output.token_ids], np.int64)
            sequences.append(TreeSequence(leaf, token_ids, mask, **arrays))
        return sequences

    def _heirs(self) -> dict[int, int]:
        """Of each sample at whose very end others go on, the first of these."""
        heirs: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            if node.parent is not None and node.branch_position == self.nodes[node.parent].end:
                heirs.setdefault(node.parent, index)
        return heirs

    def _fill(self, segments: list[Segment], first_positions: list[int]) -> PackedTree:
        num_prompt, count = len(self.prompt_token_ids), segments[-1].end
        integers = {name: np.zeros(count, np.int64) for name in ("token_ids", "positions", "segment_ids")}
        arrays = {name: np.zeros(count, np.float32) for name in _ARRAYS}
        predecessors = np.arange(-1, count - 1)
        loss_mask = np.zeros(count, bool)
        for index, (segment, position) in enumerate(zip(segments, first_positions, strict=True)):
            rows = slice(segment.start, segment.end)
            integers["segment_ids"][rows] = index
            integers["positions"][rows] = np.arange(position, position + segment.end - segment.start)
            if segment.node < 0:
                integers["token_ids"][rows] = self.prompt_token_ids
                continue
            node = self.nodes[segment.node]
            own = slice(position - num_prompt, position - num_prompt + segment.end - segment.start)
            integers["token_ids"][rows] = node.output.token_ids[own]
            loss_mask[rows] = np.arange(own.start, own.stop) >= node.sampled.start
            predecessors[segment.start] = segments[segment.parent].end - 1
            for name, values in arrays.items():
                values[rows] = getattr(node.output, name)[own]
        return PackedTree(segments=segments, predecessors=predecessors, loss_mask=loss_mask, **integers, **arrays)


def _parents_first(samples: dict[tuple[str, int], CompletionOutput]) -> Iterator[tuple[str, int]]:
    """The names of all samples, each after that of the sample that it was forked from."""
    done: set[tuple[str, int]] = set()
    for name in samples:
        path = [name]
        while path[-1] not in done:
            parent = samples[path[-1]].parent
            if parent is None:
                break
            parent = (parent[0], parent[1])  # a list, where the output was JSON
            if parent not in samples:
                raise ValueError(f"sample {parent[1]} of request {parent[0]!r} was forked from, and is missing")
            path.append(parent)
        for ancestor in reversed(path):
            if ancestor not in done:
                done.add(ancestor)
                yield ancestor


def _node(
    request_id: str, sample: CompletionOutput, places: dict[tuple[str, int], int], nodes: list[TreeNode]
) -> TreeNode:
    if sample.parent is None:
        return TreeNode(request_id, None, 0, sample)
    at, parent = sample.branch_position, places[sample.parent[0], sample.parent[1]]
    before = nodes[parent].output.token_ids
    if sample.token_ids[:at] != before[:at] or at > len(before):
        raise ValueError(
            f"sample {sample.sample_index} of request {request_id!r} does not begin with the first {at} tokens of the "
            "sample that it was forked from"
        )
    place: int | None = parent
    while place is not None and at <= nodes[place].branch_position:
        place = nodes[place].parent
    return TreeNode(request_id, place, at, sample)
