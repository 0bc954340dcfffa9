#!/usr/bin/env bash
# The C core, cross-compiled for aarch64: a load must be one acquiring instruction and a store one
# releasing instruction. x86-64 cannot show a missing order; there every load acquires anyway.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
CC="${AARCH64_CC:-aarch64-linux-gnu-gcc}"
OBJDUMP="${AARCH64_OBJDUMP:-aarch64-linux-gnu-objdump}"
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT

cat >"$FOLDER/core.c" <<'C'
#include "_atomics_core.h"
int64_t core_load(const int64_t *word) { return gemmlink_load(word); }
void core_store(int64_t *word, int64_t value) { gemmlink_store(word, value); }
int64_t core_wait(const int64_t *word, int64_t at_least, int64_t started, int64_t until) {
    return gemmlink_wait(word, at_least, started, until);
}
C
"$CC" -std=gnu11 -O2 -Wall -Wextra -Werror -I transport -c "$FOLDER/core.c" -o "$FOLDER/core.o"

# expect FUNCTION PATTERN: the function contains an instruction that matches, on 64-bit registers.
expect() {
    "$OBJDUMP" --disassemble="$1" --no-show-raw-insn "$FOLDER/core.o" >"$FOLDER/$1.txt"
    if ! grep -E "$2" "$FOLDER/$1.txt"; then
        echo "$1 has no instruction that matches $2:" >&2
        cat "$FOLDER/$1.txt" >&2
        exit 1
    fi
}
expect core_load '\s(ldar|ldapr)\s+x'
expect core_store '\sstlr\s+x'
expect core_wait '\s(ldar|ldapr)\s+x'
expect core_wait '\syield'
