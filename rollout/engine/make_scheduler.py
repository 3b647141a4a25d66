"""The scheduler that an engine's configuration and its worker's pools make."""

from __future__ import annotations

from rollout.config import EngineConfig
from rollout.core.scheduler import Scheduler, SchedulerConfig
from rollout.sampling.guide import GrammarGuide
from rollout.speculation.drafters import make_speculation
from rollout.worker.worker import Worker


def make_scheduler(config: EngineConfig, max_model_len: int, worker: Worker) -> Scheduler:
    """A scheduler over the worker's pools, which speculates as `config` says."""
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_blocks=worker.pool.num_blocks,
            num_host_blocks=worker.pool.num_host_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
            preemption_mode=config.preemption_mode,
            num_draft_blocks=worker.num_draft_blocks,
        ),
        make_speculation(
            config.speculative_config,
            GrammarGuide(lambda: worker.grammars),
            can_have_alternatives=worker.can_have_alternatives,
        ),
    )
