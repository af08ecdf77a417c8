#!/usr/bin/env bash
# Installs the project with its test tools into .venv; checks style and types; runs the tests. Arguments go to pytest.
set -euo pipefail
. "$(dirname "$0")/setup.sh" "[test]"
run() {
    echo "+ $*"
    "$@"
}
run .venv/bin/ruff check .
run .venv/bin/ruff format --check .
run .venv/bin/pyright --pythonpath .venv/bin/python
run .venv/bin/python -m pytest "$@"
