"""Executes a plan: plain data to ragged tensors, one forward pass, logits of the rows that need them, draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch

import rollout_kernels
from rollout.config import LogprobsMode
from rollout.core.schedule import Draw, ScheduledSequence, SchedulePlan, StepResult, TopLogprobs, join
from rollout.core.stop import NOT_A_TOKEN
from rollout.models.causal_lm import CausalLM
from rollout.sampling.adjust import Adjuster
from rollout.sampling.grammars import Grammars, PendingMasks
from rollout.sampling.likely import likely_tokens
from rollout.sampling.sampler import sample_rows
from rollout.sampling.top_logprobs import top_logprobs_of_draws, top_logprobs_of_targets
from rollout.speculation.features import FeatureCache
from rollout.speculation.rejection import RejectionSampler
from rollout.worker.batch import ForwardBatch, KVCaches, LastRows, PagedContext
from rollout.worker.decode_program import MOST_DECODE_ROWS, DecodePrograms
from rollout.worker.graphs import DecodeGraphs
from rollout.worker.inputs import DirectInputs, StepInputs, fetch
from rollout_kernels.cpu.times import KernelTimes

_SCORE_ROWS = 256  # rows of logits held at once, where a sequence has several: 256 x 49,152 float32 are 50 MB


@dataclass(slots=True)
class Runner:
    """A model with its KV caches. `tiles_per_block` x 16 slots make a block."""

    model: CausalLM
    kv_caches: KVCaches
    host_caches: KVCaches = field(default_factory=list)  # for the KV of preempted requests, where swapping is on
    block_size: int = 16
    times: KernelTimes | None = None  # where set, the kernels' times are added up
    decode_programs: DecodePrograms | None = None  # None: every step runs through the model's Python
    decode_graphs: DecodeGraphs | None = None  # the same for Triton's kernels; at most one of the two
    inputs: StepInputs = field(default_factory=DirectInputs)
    logprobs_mode: LogprobsMode = "raw_logprobs"  # what the most likely tokens beside the drawn ones are of
    adjuster: Adjuster | None = None  # None: no draw has parameters that change logits
    grammars: Callable[[], Grammars] | None = None  # None: no draw has a grammar
    features: FeatureCache | None = None  # where set, final hidden states are kept: a drafter reads them
    notes_likely: bool = False  # whether drafters learn from the most likely tokens beside the drawn ones
    rejection: RejectionSampler | None = None  # None: a guess is right where it is what is drawn anyway

    @property
    def tiles_per_block(self) -> int:
        return -(-self.block_size // 16)

    @torch.inference_mode()
    def execute(self, plan: SchedulePlan) -> StepResult:
        """Swaps and copies blocks, computes every scheduled token, and draws. Raises nothing for NaN logits: their
        draws come back as token id -1."""
        masks = self._begin_masks(plan)
        if masks is None:
            return self._execute(plan, None)
        try:
            result = self._execute(plan, masks)
            masks.finish(result)
            return result
        finally:
            masks.wait()

    def _begin_masks(self, plan: SchedulePlan) -> PendingMasks | None:
        """Masks of the draws that have a grammar, which are computed while the model runs."""
        if all(draw.state is None or draw.params.structured_outputs is None for draw in plan.draws):
            return None
        assert self.grammars is not None, "draws have grammars"
        return self.grammars().begin(plan.draws)

    def _execute(self, plan: SchedulePlan, masks: PendingMasks | None) -> StepResult:
        self._move_blocks(plan)
        if plan.is_empty:
            return _empty_result()
        decode_rows = _rows_of_decode(plan)
        logits = None if decode_rows is None else self._replay(plan.sequences)
        if decode_rows is not None and logits is not None:
            return self._sample(plan, plan.draws, logits, decode_rows, masks)
        counts = np.array([len(sequence.token_ids) for sequence in plan.sequences])
        rows = _rows_from_end(plan, counts)
        if any(sequence.target_token_ids for sequence in plan.sequences):
            hidden, ends = self._forward(plan.sequences, None), counts.cumsum()
            result = self._draw(plan, hidden, ends, rows, masks)
            self._score(plan, hidden, ends, result)
            return result
        wanted = np.zeros(len(plan.sequences), np.int64)
        for draw, row in zip(plan.draws, rows, strict=True):
            wanted[draw.sequence_index] = max(wanted[draw.sequence_index], row)
        if not plan.draws:  # a chunk in the middle of a prompt: the model still needs some row to end with
            wanted[0] = 1
        return self._draw(plan, self._forward(plan.sequences, wanted), wanted.cumsum(), rows, masks)

    def _replay(self, sequences: list[ScheduledSequence]) -> torch.Tensor | None:
        """Logits of every scheduled token of a decode step, where such a step is recorded, otherwise None."""
        if self.decode_graphs is not None:
            return self.decode_graphs.run(sequences)
        if self.decode_programs is not None:
            return self.decode_programs.run(sequences, self.times)
        return None

    @torch.inference_mode()
    def last_logits(
        self, sequences: list[ScheduledSequence], is_wanted: Sequence[bool]
    ) -> tuple[torch.Tensor, list[int]]:
        """Computes every scheduled token. Returns logits float32 [R, vocab], until the next step, and the rows of the
        last tokens of those sequences that are wanted. A few tokens of each take no longer than one: their step is
        recorded too."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        logits = self._replay(sequences) if max(lengths) <= MOST_DECODE_ROWS else None
        if logits is not None:
            ends = accumulate(lengths)
            return logits, [end - 1 for end, wanted in zip(ends, is_wanted, strict=True) if wanted]
        counts = np.array(is_wanted, np.int64)
        if not counts.any():  # the model still needs some row to end with
            counts[0] = 1
        logits = self.model.compute_logits(self._forward(sequences, counts))
        return logits, list(range(sum(is_wanted)))

    def _move_blocks(self, plan: SchedulePlan) -> None:
        if plan.swap_out:
            rollout_kernels.copy_blocks_between(self.kv_caches, self.host_caches, plan.swap_out, self.tiles_per_block)
        if plan.swap_in:
            rollout_kernels.copy_blocks_between(self.host_caches, self.kv_caches, plan.swap_in, self.tiles_per_block)
        if plan.block_copies:
            rollout_kernels.copy_blocks(self.kv_caches, plan.block_copies, self.tiles_per_block)
        if self.features is not None:
            self.features.move(plan)

    def _forward(self, sequences: list[ScheduledSequence], wanted: np.ndarray | None) -> torch.Tensor:
        """Final hidden states of all scheduled tokens, [T, hidden], or of the last `wanted[i]` tokens of sequence i."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        starts = np.fromiter((sequence.start for sequence in sequences), np.int64, len(sequences))
        counts = np.asarray(lengths, np.int64)
        query_start = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        num_tokens = int(query_start[-1])

        input_ids = np.fromiter((t for sequence in sequences for t in sequence.token_ids), np.int64, num_tokens)
        owner = np.repeat(np.arange(len(sequences)), counts)
        positions = np.arange(num_tokens) - query_start[:-1].astype(np.int64)[owner] + starts[owner]
        block_tables = _block_tables(sequences)
        slots_per_block = self.tiles_per_block * 16
        last_places = np.fromiter((sequence.last_place for sequence in sequences), np.int32, len(sequences))
        has_other_places = bool((last_places >= 0).any())
        places = np.where(last_places[owner] >= 0, last_places[owner], positions) if has_other_places else positions
        blocks = block_tables[owner, places // self.block_size].astype(np.int64)
        slot_mapping = blocks * slots_per_block + places % self.block_size

        seq_lens = (starts + counts).astype(np.int32)
        last_counts = np.zeros(0, np.int64) if wanted is None else wanted
        last_start = np.concatenate([[0], last_counts.cumsum()]).astype(np.int32)
        last_rows = np.arange(last_start[-1])
        last_rows += np.repeat(counts.cumsum()[: len(last_counts)] - last_counts.cumsum(), last_counts)
        adapter_slots = [sequence.adapter_slot for sequence in sequences]
        adapters = [np.repeat(np.array(adapter_slots, np.int32), counts)] if max(adapter_slots) >= 0 else []
        others = [last_places] if has_other_places else []
        ids, places, slots, tables, keys, first, last, last_first, *more = self.inputs.send(
            [
                *(input_ids, positions, slot_mapping, block_tables, seq_lens, query_start, last_rows, last_start),
                *(*adapters, *others),
            ]
        )
        paged = PagedContext(
            self.kv_caches, tables, keys, slots, self.block_size, last_places=more[-1] if has_other_places else None
        )
        of_rows = more[0] if adapters else None
        features = self.features
        if wanted is None or (features is not None and features.covers_all_tokens):
            hidden = self.model(ids, places, ForwardBatch(query_start=first, paged=paged, adapter_ids=of_rows))
            if features is not None:
                features.write(slots, hidden)
            return hidden if wanted is None else hidden[last]
        batch = ForwardBatch(first, paged=paged, last_rows=LastRows(last, last_first), adapter_ids=of_rows)
        hidden = self.model(ids, places, batch)
        hidden = hidden if len(hidden) == len(last_rows) else hidden[last]
        if features is not None:
            features.write(slots[last], hidden)
        return hidden

    def _draw(
        self,
        plan: SchedulePlan,
        hidden: torch.Tensor,
        ends: np.ndarray,
        rows_from_end: list[int],
        masks: PendingMasks | None,
    ) -> StepResult:
        """Draws of the plan: draw i from row `rows_from_end[i]`, counted from the end, of its sequence's rows of
        `hidden`, which end at `ends`. Many rows are drawn from in several goes, so that few logits exist at once."""
        draws = plan.draws
        if not draws:
            return _empty_result()
        index = np.array([draw.sequence_index for draw in draws])
        used, rows = np.unique(ends[index] - np.array(rows_from_end), return_inverse=True)  # rows: in order
        most = max(_SCORE_ROWS, len(np.unique(index)))  # a row of each sequence there is room for
        results: list[StepResult] = []
        for first in range(0, len(used), most):
            (some,) = self.inputs.send([used[first : first + most]])
            logits = self.model.compute_logits(hidden[some])  # float32 [R, vocab]
            start, end = np.searchsorted(rows, [first, first + most])
            results.append(self._sample(plan, draws[start:end], logits, (rows[start:end] - first).tolist(), masks))
        return results[0] if len(results) == 1 else _join_results(results)

    def _sample(
        self,
        plan: SchedulePlan,
        draws: Sequence[Draw],
        logits: torch.Tensor,
        rows: list[int],
        masks: PendingMasks | None,
    ) -> StepResult:
        """One token for each of these draws of the plan, from row `rows[i]` of the logits."""
        adjustment = None
        if any(draw.state is not None for draw in draws):
            assert self.adjuster is not None, "draws have parameters that change logits"
            grammar_masks = None if masks is None else masks.rows_of(draws)
            adjustment = self.adjuster.adjust(logits, draws, rows, self.inputs, grammar_masks)
        if self.rejection is None:
            sampled = sample_rows(logits, draws, rows, self.inputs, adjustment)
        else:
            sampled = self.rejection.sample(plan.sequences, draws, logits, rows, self.inputs, adjustment)
        token_ids, raw_logprobs, sampled_logprobs, kept_mass, entropy = fetch(
            [sampled.token_ids, sampled.raw_logprobs, sampled.sampled_logprobs, sampled.kept_mass, sampled.entropy]
        )
        result = StepResult(token_ids, raw_logprobs, sampled_logprobs, kept_mass, entropy)
        result.top_logprobs = top_logprobs_of_draws(
            logits, draws, rows, sampled, token_ids, adjustment, self.logprobs_mode, self.inputs
        )
        if self.notes_likely:
            result.likely = likely_tokens(logits, draws, rows, token_ids, raw_logprobs, sampled_logprobs, self.inputs)
        if NOT_A_TOKEN in token_ids.tolist():
            result.failures = _why_not_drawn(sampled.status) | ({} if adjustment is None else adjustment.failures)
        return result

    def _score(self, plan: SchedulePlan, hidden: torch.Tensor, ends: np.ndarray, result: StepResult) -> None:
        for index, sequence in enumerate(plan.sequences):
            targets = sequence.target_token_ids
            if not targets:
                continue
            first = int(ends[index]) - len(sequence.token_ids)
            scores: list[np.ndarray] = []
            top: list[TopLogprobs] = []
            for start in range(0, len(targets), _SCORE_ROWS):
                (ids,) = self.inputs.send([np.array(targets[start : start + _SCORE_ROWS], np.int64)])
                logits = self.model.compute_logits(hidden[first + start : first + start + len(ids)])
                if sequence.num_top_logprobs is None:
                    scores.append(rollout_kernels.token_logprobs(logits, ids).cpu().numpy())
                else:
                    most_likely, logprobs = top_logprobs_of_targets(logits, ids, sequence.num_top_logprobs)
                    top.append(most_likely)
                    scores.append(logprobs)
            result.prompt_logprobs[sequence.request_id] = np.concatenate(scores)
            if top:
                result.prompt_top_logprobs[sequence.request_id] = join(top)


def _block_tables(sequences: list[ScheduledSequence]) -> np.ndarray:
    """int32 [S, max_blocks]; unused entries are 0 and never read."""
    width = max(len(sequence.block_ids) for sequence in sequences)
    tables = np.zeros((len(sequences), width), np.int32)
    for row, sequence in zip(tables, sequences, strict=True):
        row[: len(sequence.block_ids)] = sequence.block_ids
    return tables


def _rows_of_decode(plan: SchedulePlan) -> list[int] | None:
    """The row of each draw among all scheduled tokens, where the plan is one decode step: a few tokens a sequence, and
    a draw from every one, but for one of each at most. Otherwise None."""
    if not plan.is_decode or any(sequence.target_token_ids for sequence in plan.sequences):
        return None
    if plan.num_scheduled_tokens == len(plan.sequences):
        return [draw.sequence_index for draw in plan.draws]
    ends = list(accumulate(len(sequence.token_ids) for sequence in plan.sequences))
    if max(len(sequence.token_ids) for sequence in plan.sequences) > MOST_DECODE_ROWS:
        return None
    rows: list[int] = []
    for draw in plan.draws:
        length = len(plan.sequences[draw.sequence_index].token_ids)
        rows.append(ends[draw.sequence_index] - (length if draw.row >= 0 else 1) + max(draw.row, 0))
    return rows if all(row < after for row, after in pairwise(rows)) else None


def _rows_from_end(plan: SchedulePlan, counts: np.ndarray) -> list[int]:
    """The row of each draw, counted from the end of its sequence's scheduled tokens: 1 is the last."""
    return [1 if draw.row == -1 else int(counts[draw.sequence_index]) - draw.row for draw in plan.draws]


def _join_results(parts: Sequence[StepResult]) -> StepResult:
    """The draws of several results, one after the other."""
    starts = np.cumsum([0, *(len(part.token_ids) for part in parts)]).tolist()
    return StepResult(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        raw_logprobs=np.concatenate([part.raw_logprobs for part in parts]),
        sampled_logprobs=np.concatenate([part.sampled_logprobs for part in parts]),
        kept_mass=np.concatenate([part.kept_mass for part in parts]),
        entropy=np.concatenate([part.entropy for part in parts]),
        failures={
            start + index: why
            for start, part in zip(starts, parts, strict=False)
            for index, why in part.failures.items()
        },
        top_logprobs={
            start + index: top
            for start, part in zip(starts, parts, strict=False)
            for index, top in part.top_logprobs.items()
        },
        likely={
            start + index: likely
            for start, part in zip(starts, parts, strict=False)
            for index, likely in part.likely.items()
        },
    )


def _why_not_drawn(status: torch.Tensor) -> dict[int, str]:
    """Why draws have no token, by their index."""
    reasons = {
        rollout_kernels.STATUS_NOT_NUMBERS: "the logits are not numbers",
        rollout_kernels.STATUS_NOTHING_LEFT: "no token was left to draw",
    }
    return {index: reasons[code] for index, code in enumerate(status.tolist()) if code in reasons}


def _empty_result() -> StepResult:
    floats = np.empty(0, np.float32)
    return StepResult(np.empty(0, np.int64), floats, floats, floats, floats)
