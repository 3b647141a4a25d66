"""Fixtures for every test: models, and settings that hold for the whole suite."""

from __future__ import annotations

import os
import signal

# Triton looks at this once, when somebody imports it, be it another library: its kernels run on CPU tensors here.
os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rollout.models.pretrained import ensure_smollm2
from tests.support.tiny import make_tiny_llama

# A shell starts what runs in the background deaf to Ctrl-C, which some tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

# Times on a shared machine say nothing, so there are no deadlines; the example that failed is printed to be replayed.
settings.register_profile("rollout", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rollout")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bf16 folder of SmolLM2-135M-Instruct, converted on first use and cached between runs."""
    return ensure_smollm2()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(**options)` is `make_tiny_llama` in a folder of its own, made once for the same options."""
    made: dict[str, Path] = {}

    def make(**options: object) -> Path:
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny") / "model"
            made[key] = make_tiny_llama(folder, **options)  # type: ignore[arg-type]  # of the types that it asks for
        return made[key]

    return make
