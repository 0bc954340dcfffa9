#!/usr/bin/env bash
# Everything built in is proved, and docs/protocols.md says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT

"$PYTHON" -m gemmlink check protocol --write "$FOLDER/protocols.md"
diff -u docs/protocols.md "$FOLDER/protocols.md" || {
    echo "docs/protocols.md is out of date; generate it again:" >&2
    echo "  python -m gemmlink check protocol --write docs/protocols.md" >&2
    exit 1
}
