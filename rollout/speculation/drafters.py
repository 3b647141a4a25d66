"""From the configuration to the drafters that the scheduler asks."""

from __future__ import annotations

from rollout.core.speculation import Drafter, Guide, Speculation
from rollout.request import Request
from rollout.speculation.config import SpeculativeConfig
from rollout.speculation.ngram import NgramDrafter
from rollout.speculation.suffix import Corpora


def make_speculation(
    config: SpeculativeConfig | None, guide: Guide | None = None, *, can_have_alternatives: bool = False
) -> Speculation | None:
    """What a scheduler speculates with; None where it does not.

    `guide` knows the grammars of requests. It is not asked where guesses are verified by rejection, which is right only
    where it does not depend on a guess whether there is one; nor are there alternatives then.
    """
    if config is None:
        return None
    corpora = Corpora(config.suffix_decoding_max_cached_tokens, uses_noise=config.verification == "coupled")

    def ngram(request: Request) -> Drafter:
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)

    def suffix(request: Request) -> Drafter:
        return corpora.drafter(request)

    coupled = config.verification == "coupled"
    make_drafter = ngram if config.method == "ngram" else suffix
    return Speculation(
        None if config.has_weights else make_drafter,
        config.num_speculative_tokens,
        config.max_batch_for_speculation,
        watches_cost=config.only_if_faster,
        guide=guide if coupled else None,
        most_alternatives=config.num_alternatives if coupled and can_have_alternatives else 0,
    )
