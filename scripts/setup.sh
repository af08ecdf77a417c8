# Sourced by quickstart.sh and test.sh: goes to the project's root, makes .venv where none is, installs the project in it.
# usage: . scripts/setup.sh EXTRAS        (EXTRAS: "" or "[test]")
# PYTHON chooses the interpreter (3.11 to 3.13).
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/python ]; then
    echo "+ ${PYTHON:-python3} -m venv .venv"
    "${PYTHON:-python3}" -m venv .venv
fi
echo "+ .venv/bin/python -m pip install -e .$1"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".$1"
