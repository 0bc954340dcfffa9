#!/usr/bin/env bash
# check_python.sh PYTHON TORCH: the tests that need no device, on another Python and torch.
# The environment is kept outside the checkout, since torch is some gigabytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERSION="$1" TORCH="$2"
CACHE="${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gemmlink-ci}"
UV="${UV:-uv}"

# An interpreter that starts and is of that version; a version manager's stub may do neither.
find_python() {
    local candidate
    for candidate in "$(command -v "python$VERSION" || true)" \
        "$HOME"/.pyenv/versions/"$VERSION".*/bin/python; do
        if [ -x "$candidate" ] && [ "$("$candidate" -c \
            'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$VERSION" ]; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "Python $VERSION is needed to run the tests on it: put python$VERSION on PATH, or" \
        "install it as ~/.pyenv/versions/$VERSION.N" >&2
    return 1
}

PYTHON="$(find_python)"
NAME="py${VERSION/./}"
KEY="$({ "$PYTHON" -VV; echo "$TORCH"; cat pyproject.toml; } | sha256sum | cut -c1-12)"
VENV="$CACHE/$NAME-$KEY"
if [ ! -e "$VENV/.complete" ]; then
    echo "making $VENV"
    rm -rf "$CACHE/$NAME"-*
    "$UV" venv --quiet --python "$PYTHON" "$VENV"
    "$UV" pip install --quiet --python "$VENV/bin/python" "torch==$TORCH" \
        -r pyproject.toml --extra dev
    touch "$VENV/.complete"
fi
"$VENV/bin/python" -c 'import sys, torch; print(sys.version.split()[0], "torch", torch.__version__)'
"$VENV/bin/python" -m pytest -p no:cacheprovider --no-skips \
    --numprocesses 2 --dist loadfile tests/none tests/test_layout.py
