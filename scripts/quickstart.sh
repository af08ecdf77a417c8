#!/usr/bin/env bash
# Installs the project into .venv and trains a tiny model to add with GRPO. Arguments go to the training command.
set -euo pipefail
. "$(dirname "$0")/setup.sh" ""
echo "+ .venv/bin/python -m jaxrl_llm.train --config quickstart $*"
exec .venv/bin/python -m jaxrl_llm.train --config quickstart "$@"
