"""Medusa's heads and EAGLE's layer guess what the papers' formulas say, from features that the engine's steps left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as changed
from safetensors.torch import load_file

from rollout import LLM, SamplingParams, SpeculativeConfig
from rollout.core.schedule import DraftPlan, DraftSequence, ScheduledSequence, SchedulePlan
from rollout.models.causal_lm import CausalLM
from rollout.platform.platform import platform_for
from rollout.speculation.eagle import EagleDrafter
from rollout.speculation.features import FeatureCache, slots_per_block
from rollout.speculation.guesses import draw_guesses
from rollout.speculation.medusa import MedusaDrafter
from rollout.speculation.model_drafter import DrafterHost
from rollout.worker.inputs import DirectInputs
from rollout.worker.ledger import MemoryLedger
from rollout.worker.runner import Runner
from tests.support.drafters import eagle_reference, make_eagle, make_medusa, medusa_reference, target_features
from tests.support.tiny import make_tiny_llama

TEXTS = [[7, 8, 9, 40, 41, 90, 17, 66, 3, 12, 100], [20, 21], list(range(30, 70))]
GREEDY = SamplingParams(temperature=0.0)
WIDTH = 12  # blocks of a sequence at most


class Engine:
    """A runner with features beside its pool, without scheduler: the test says what is computed."""

    def __init__(self, folder: Path, block_size: int, covers_all_tokens: bool) -> None:
        llm = LLM(folder, kv_cache_memory="8MiB", block_size=block_size)
        self.llm, self.block_size = llm, block_size
        self.runner: Runner = llm.collective_rpc(lambda worker: worker.runner)[0]
        self.runner.decode_programs = None
        self.model = self.runner.model
        rows = torch.full((200 * slots_per_block(block_size) + 1, 64), torch.nan)
        self.features = self.runner.features = FeatureCache(rows, None, block_size, covers_all_tokens)

    def host(self, method: str, folder: Path, num_drafts: int) -> DrafterHost:
        platform = platform_for("cpu")
        return DrafterHost(
            config=self.llm.config,
            speculative=SpeculativeConfig(method, num_drafts, model=str(folder)),  # type: ignore[arg-type]
            model=self.model,
            folder=folder,
            dtype=torch.float32,
            longest=512,
            platform=platform,
            ledger=MemoryLedger(platform.used_memory, platform.trim),
            inputs=DirectInputs(),
            kv_layout="tiled",
            runs_triton=False,
            features=lambda: self.features,
        )

    def table(self, number: int) -> list[int]:
        """Blocks of sequence `number` in the engine's pool, in no order."""
        return [(number + 3 * place) % 3 + 3 * (WIDTH - 1 - place) for place in range(WIDTH)]

    def compute(self, number: int, token_ids: list[int], chunk: int) -> None:
        """All but the last token, as a decoding request has it."""
        for start in range(0, len(token_ids) - 1, chunk):
            some = token_ids[start : min(start + chunk, len(token_ids) - 1)]
            sequence = ScheduledSequence(f"r{number}", start, some, self.table(number))
            self.runner.execute(SchedulePlan([sequence], num_scheduled_tokens=len(some)))


def asked(number: int, token_ids: list[int], start: int, num_drafts: int, engine: Engine) -> DraftSequence:
    draft_blocks = [100 - block for block in engine.table(number)]
    return DraftSequence(
        f"r{number}", start, token_ids[start:], draft_blocks, engine.table(number), num_drafts, GREEDY, 1, 0
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tie=False)


@pytest.mark.parametrize("own_output", [False, True])
def test_head_i_guesses_from_the_feature_two_places_and_i_before(
    folder: Path, tmp_path: Path, own_output: bool
) -> None:
    make_medusa(tmp_path, num_layers=2, own_output=own_output, prefix="medusa_head." if own_output else "")
    engine = Engine(folder, 4, covers_all_tokens=True)
    drafter = MedusaDrafter(engine.host("medusa", tmp_path, 3))
    drafter.load()
    drafter.allocate(0)
    for number, text in enumerate(TEXTS):
        engine.compute(number, text, 5)
    plan = [
        asked(number, text, len(text) - 1, num, engine)
        for number, (text, num) in enumerate(zip(TEXTS, (3, 1, 2), strict=True))
    ]
    guesses = drafter.propose(DraftPlan(plan))
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}
    for sequence, text in zip(plan, TEXTS, strict=True):
        features, _, output = target_features(folder, text)
        wanted = []
        for head in range(sequence.num_drafts):
            hidden = medusa_reference(tensors, features[len(text) - 2], head, 2)
            matrix = tensors[f"{head}.2.weight"].double() if own_output else output
            wanted.append(int((matrix @ hidden).argmax()))
        assert guesses[sequence.request_id] == wanted
    own = torch.nn.Module.named_parameters(drafter.heads)
    assert set(drafter.parameters()) == {name for name, _ in own} == set(tensors)


@pytest.mark.parametrize(("block_size", "bias"), [(4, True), (16, False), (20, True)])
def test_eagle_feeds_its_features_back(folder: Path, tmp_path: Path, block_size: int, bias: bool) -> None:
    make_eagle(tmp_path, bias=bias)
    tensors = torch.load(tmp_path / "pytorch_model.bin")
    engine = Engine(folder, block_size, covers_all_tokens=True)
    drafter = EagleDrafter(engine.host("eagle", tmp_path, 4))
    drafter.load()
    drafter.allocate(110)
    for number, text in enumerate(TEXTS):
        engine.compute(number, text, 7)

    def wanted(text: list[int], num_drafts: int) -> list[int]:
        features, embedded, output = target_features(folder, text)
        features, embedded = features[:-1], embedded[1:]
        guesses: list[int] = []
        for _ in range(num_drafts):
            hidden = eagle_reference(tensors, embedded, features)[-1]
            guesses.append(int((output @ hidden).argmax()))
            embedding = target_features(folder, guesses[-1:])[1]
            embedded, features = torch.cat([embedded, embedding]), torch.cat([features, hidden[None]])
        return guesses

    # One sequence at once, one in chunks of which all but the last only fill the cache, one of two tokens.
    first = [
        asked(0, TEXTS[0], 0, 4, engine),
        asked(2, TEXTS[2][:25], 0, 0, engine),
        asked(1, TEXTS[1], 0, 2, engine),
    ]
    guesses = drafter.propose(DraftPlan(first))
    assert guesses == {"r0": wanted(TEXTS[0], 4), "r1": wanted(TEXTS[1], 2)}
    second = [asked(2, TEXTS[2], 25, 3, engine), asked(0, TEXTS[0], len(TEXTS[0]) - 1, 1, engine)]
    assert drafter.propose(DraftPlan(second)) == {"r2": wanted(TEXTS[2], 3), "r0": wanted(TEXTS[0], 1)}
    # The guesses' own keys are written over when other tokens have come in their places.
    longer = [*TEXTS[0], 5, 77]
    engine.compute(0, longer, 3)
    (third,) = drafter.propose(DraftPlan([asked(0, longer, len(TEXTS[0]), 4, engine)])).values()
    assert third == wanted(longer, 4)
    assert "embed_tokens.weight" not in drafter.parameters()
    assert set(drafter.parameters()) == set(tensors) - {"embed_tokens.weight"}


def test_guesses_are_drawn_with_the_noise_of_their_positions(folder: Path, tmp_path: Path) -> None:
    make_medusa(tmp_path, strength=0.0)  # every head says what the model has said one place before
    engine = Engine(folder, 8, covers_all_tokens=True)
    drafter = MedusaDrafter(engine.host("medusa", tmp_path, 3))
    drafter.load()
    engine.compute(0, TEXTS[0], 5)
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.9)
    sequence = changed(asked(0, TEXTS[0], 10, 3, engine), params=params, seed=5, sample_index=2)
    logits = engine.model.compute_logits(engine.features.read([engine.table(0)], [torch.tensor([9]).numpy()]))
    wanted = [draw_guesses(logits, [sequence], [position], DirectInputs())[0] for position in (11, 12, 13)]
    assert drafter.propose(DraftPlan([sequence])) == {"r0": wanted}
    assert len(set(wanted)) > 1  # not the same noise each time


@pytest.mark.parametrize(
    ("method", "fields", "named"),
    [
        ("eagle", {"draft_vocab_size": 100}, "EAGLE-3"),
        ("eagle", {"vocab_size": 130}, "vocab_size=130"),
        ("eagle", {"hidden_size": 32, "head_dim": 16}, "hidden_size=32"),
        ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ("medusa", {"medusa_num_heads": 2}, "tensor '2.0.linear.*' in .* has no place"),
        ("medusa", {"medusa_num_heads": 4}, "lacks 2 tensors: 3.0.linear.bias"),
        ("medusa", {"medusa_num_heads": 1}, "num_speculative_tokens=2 is not valid: .* has 1 heads"),
        ("medusa", {"medusa_num_layers": None}, "medusa_num_layers=None"),
        ("medusa", {"vocab_size": 7}, "vocab_size=7"),
    ],
)
def test_checkpoints_of_something_else_are_refused(
    folder: Path, tmp_path: Path, method: str, fields: dict[str, object], named: str
) -> None:
    engine = Engine(folder, 8, covers_all_tokens=True)
    make = make_eagle if method == "eagle" else make_medusa
    config = make(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(ValueError, match=named):
        (EagleDrafter if method == "eagle" else MedusaDrafter)(engine.host(method, tmp_path, 2)).load()


def test_folders_without_heads_are_refused(folder: Path, tmp_path: Path) -> None:
    engine = Engine(folder, 8, covers_all_tokens=True)
    host = engine.host("medusa", tmp_path, 2)
    with pytest.raises(ValueError, match=r"holds none of model\.safetensors"):
        MedusaDrafter(host)
    nowhere = replace(host, speculative=SpeculativeConfig("eagle", model=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="it must be the folder"):
        EagleDrafter(nowhere)


def test_a_model_that_does_not_say_how_it_embeds_has_no_eagle(folder: Path, tmp_path: Path) -> None:
    engine = Engine(folder, 8, covers_all_tokens=True)
    make_eagle(tmp_path)
    other = type("Other", (type(engine.model),), {"embed": CausalLM.embed})
    model = other.__new__(other)
    with pytest.raises(ValueError, match="method='eagle' is not valid for Other: it has no `embed`"):
        EagleDrafter(replace(engine.host("eagle", tmp_path, 2), model=model))
