#!/usr/bin/env bash
# Build the sdist, the wheel from it, install that wheel beside torch and use it from elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT="$PWD"
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT

# A leftover build/ would bring deleted modules back.
rm -rf build
python3 -m venv "$FOLDER/tools"
"$FOLDER/tools/bin/python" -m pip install --quiet build
"$FOLDER/tools/bin/python" -m build --outdir "$FOLDER/dist" . >"$FOLDER/build.log" 2>&1 ||
    { cat "$FOLDER/build.log" >&2; exit 1; }
ls "$FOLDER/dist"

python3 -m venv "$FOLDER/venv"
"$FOLDER/venv/bin/python" -m pip install --quiet --constraint constraints.txt numpy \
    "tomli; python_version < '3.11'" \
    "$FOLDER"/dist/gemmlink-*.whl
cd /
"$FOLDER/venv/bin/python" -W error "$ROOT/.ci/installed.py" "$ROOT" extension
"$FOLDER/venv/bin/python" -m gemmlink doctor
"$FOLDER/venv/bin/gemmlink" doctor >/dev/null

# Without a compiler the same source must install all the same.
CC=/bin/false "$FOLDER/venv/bin/python" -m pip install --quiet --no-deps --force-reinstall \
    --no-cache-dir "$FOLDER"/dist/gemmlink-*.tar.gz
"$FOLDER/venv/bin/python" -W error "$ROOT/.ci/installed.py" "$ROOT" libatomic
