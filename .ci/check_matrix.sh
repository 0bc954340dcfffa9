#!/usr/bin/env bash
# docs/support-matrix.md says what a run on this machine says, and no cell is skipped unnoticed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
# Clauses and cells that CI cannot run for want of hardware or a library. Whoever adds a part that
# this machine lacks changes the number; it never changes by itself.
SKIPPED=0
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT

"$PYTHON" -m gemmlink conformance --matrix "$FOLDER/matrix.md"
diff -u docs/support-matrix.md "$FOLDER/matrix.md" || {
    echo "docs/support-matrix.md is out of date; generate it again:" >&2
    echo "  python -m gemmlink conformance --matrix docs/support-matrix.md" >&2
    exit 1
}
grep -q ", $SKIPPED skipped\.$" "$FOLDER/matrix.md" || {
    echo "the number of skipped clauses and cells is not $SKIPPED" >&2
    exit 1
}
