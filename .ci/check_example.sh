#!/usr/bin/env bash
# The example plugin, as a stranger would use it: installed beside a built gemmlink, then certified
# by its own tests and by the commands, from another directory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT="$PWD"
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT

python3 -m venv "$FOLDER/venv"
PYTHON="$FOLDER/venv/bin/python"
# Copies, since builds leave things behind, and a leftover build/ brings deleted modules back.
mkdir "$FOLDER/source"
tar --create --exclude-vcs --exclude=.venv --exclude=build --exclude='*.egg-info' . |
    tar --extract --directory "$FOLDER/source"
mv "$FOLDER/source/docs/examples/gemmlink-example" "$FOLDER/example"
"$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$FOLDER/dist" "$FOLDER/source"
"$PYTHON" -m pip install --quiet --constraint constraints.txt numpy "$FOLDER"/dist/gemmlink-*.whl \
    "$FOLDER/example[test]"

cd "$FOLDER/example"
rm -rf src build # what is tested is what was installed
"$PYTHON" -c "
import sys, gemmlink, gemmlink_example
for module in (gemmlink, gemmlink_example):
    assert module.__file__.startswith(sys.prefix), module.__file__
"
"$PYTHON" -m gemmlink plugins | grep gemmlink-example
"$PYTHON" -m pytest -q -p no:cacheprovider
"$PYTHON" -m gemmlink conformance --transport directory --epilogue pairwise >"$FOLDER/report" ||
    { cat "$FOLDER/report" >&2; exit 1; }
tail -n 1 "$FOLDER/report"
"$PYTHON" -m gemmlink check protocol --epilogue pairwise >"$FOLDER/report" ||
    { cat "$FOLDER/report" >&2; exit 1; }
tail -n 1 "$FOLDER/report"
# The gaps of the installed part are found beside it, and a line that is wrong is an error.
GAPS="$("$PYTHON" -c 'import gemmlink_example as e; print(e.__path__[0])')/transport.gaps"
echo "transport/words/a_wait_is_bound: misspelt" >>"$GAPS"
if "$PYTHON" -m gemmlink conformance --transport directory; then
    echo "an unknown id in $GAPS was not noticed, see $ROOT/docs/conformance.md" >&2
    exit 1
fi
