"""The engine on Triton's kernels, as far as a machine without a GPU goes: the interpreter, on CPU tensors.

Runner, padded decode ladder, staged inputs, sleep and policy updates are those of the CUDA path; a captured step is
replaced by calling the same step function over the same static buffers. One process for all, see
`tests/support/interpreted_engine.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tiny_model: Callable[..., Path]) -> dict[str, Any]:
    folders = [tiny_model(num_layers=layers, seed=layers) for layers in (2, 1)]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_engine", *map(str, folders)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def values(samples: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([float.fromhex(value) for sample in samples for value in sample[name]])


def test_the_reference_draws_the_same_tokens_with_the_same_probabilities(found: dict[str, Any]) -> None:
    triton, reference = found["bits"]["triton"], found["bits"]["reference"]
    assert [sample["token_ids"] for sample in triton] == [sample["token_ids"] for sample in reference]
    assert len({tuple(sample["token_ids"]) for sample in triton}) > 3  # they are not all alike
    for name in ("raw", "sampled", "kept", "entropy"):
        np.testing.assert_allclose(values(triton, name), values(reference, name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("way", ["eager, small chunks, large blocks", "one at a time"])
def test_a_sample_has_the_same_bits_by_every_way(found: dict[str, Any], way: str) -> None:
    """Contract 1, on these kernels: padded or not, in whatever batch, chunked and paged in whatever way."""
    assert found["bits"][way] == found["bits"]["triton"]


def test_decode_steps_ran_in_the_sizes_of_the_ladder(found: dict[str, Any]) -> None:
    assert found["bits"]["captured"] == [1, 4]  # prompts one at a time: alone, and one with four samples


def test_forced_tokens_and_forks_have_the_bits_of_what_was_drawn(found: dict[str, Any]) -> None:
    forced = found["forced"]
    assert forced["drawn"] == forced["chunk"] == forced["rows"]
    assert 3 in forced["captured"]  # rows of one sequence
    assert forced["fork"] == forced["fork alone"] != forced["drawn"]


def test_preempted_requests_give_the_same_bits_swapped_or_computed_again(found: dict[str, Any]) -> None:
    swapped, recomputed = found["preempted"]["swap"], found["preempted"]["recompute"]
    assert swapped["preemptions"] > 0 and recomputed["preemptions"] > 0
    assert swapped["samples"] == recomputed["samples"]
    assert [len(sample["token_ids"]) for sample in swapped["samples"]] == [12] * 3


def test_an_engine_whose_tensors_move_in_sleep_goes_on_with_the_same_bits(found: dict[str, Any]) -> None:
    life = found["life"]
    assert life["captured"] == [2] and life["captured asleep"] == []
    assert life["first"] == life["after level 1"] == life["after level 2"]
    assert life["moved"]
    ledger = life["ledger"]
    assert ledger["weights"] > 0 and ledger["kv_cache"] > 1 << 20 and ledger["inputs"] > 0 and ledger["graphs"] > 0
    assert life["asleep at 1"] == {"kv_cache": ledger["kv_cache"], "graphs": 0}
    assert life["asleep at 2"] == {"kv_cache": ledger["kv_cache"], "weights": ledger["weights"], "graphs": 0}
    assert life["resident asleep"]["weights"] == 0 and life["resident asleep"]["kv_cache"] == 0


def test_receipts_and_scores_are_those_of_the_reference(found: dict[str, Any]) -> None:
    assert found["life"]["receipt"] == found["reference"]["receipt"]
    for scores, expected in zip(found["life"]["scores"], found["reference"]["scores"], strict=True):
        np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=2e-5)


def test_a_policy_that_the_trainer_shares_is_updated_without_a_copy_and_kept_in_sleep(found: dict[str, Any]) -> None:
    life = found["life"]
    assert life["shared"] == {"bytes_copied": 0, "version": 2}
    assert life["after update"] != life["first"]
    assert "weights" not in life["kept at 2"]


def test_adapters_give_the_references_samples_and_the_same_bits_by_every_way(found: dict[str, Any]) -> None:
    adapters = found["adapters"]
    captured, reference = adapters["captured"], adapters["reference"]
    assert [sample["token_ids"] for sample in captured] == [sample["token_ids"] for sample in reference]
    np.testing.assert_allclose(values(captured, "raw"), values(reference, "raw"), rtol=2e-5, atol=2e-5)
    assert captured == adapters["eager"] == adapters["after level 2"]
    assert captured[2:] == adapters["alone"]
    assert captured[1:2] == adapters["without"]  # the row without an adapter: an engine that has none


def test_other_number_formats_give_the_references_samples_and_the_same_bits_by_every_way(found: dict[str, Any]) -> None:
    plain = found["formats"]["float16"]["reference"]
    for name, ways in found["formats"].items():
        captured, reference = ways["captured"], ways["reference"]
        assert [sample["token_ids"] for sample in captured] == [sample["token_ids"] for sample in reference], name
        np.testing.assert_allclose(values(captured, "raw"), values(reference, "raw"), rtol=0, atol=5e-3, err_msg=name)
        assert captured == ways["eager"], name
        assert captured[:1] == ways["alone"], name
        assert (reference == plain) == (name == "float16")


def test_int8_copies_on_a_device_are_given_back_in_sleep_and_made_again(found: dict[str, Any]) -> None:
    copies = found["copies"]
    assert copies["held"] == copies["released"] > 0 and copies["asleep"] == 0
    assert copies["first"] == copies["again"]
    assert copies["stale"] == ["int8.lm_head.scales"]
