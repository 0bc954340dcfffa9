"""``python -m gemmlink.conformance.mutation_table``: which mistakes who notices, as a table.

Every mutant (``mutate``, ``mistakes``) of every protocol is proved or refuted, and run by the
adversary under a few seeds; ``mutations`` does it. Exits with 1 if the adversary notices one that
the proof has let pass: then the proof is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gemmlink.conformance.mutations.judge import VERDICTS, table
from gemmlink.conformance.mutations.page import page


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gemmlink.conformance.mutation_table")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--only", default="", help="protocols whose name contains this")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each mutant, at most")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    told = parser.parse_args(arguments)
    began = time.monotonic()
    found = table(told.only, told.seeds, told.jobs)
    wrong = [each for each in found if each.verdict == VERDICTS[-1]]
    for each in wrong:
        print(f"{each.protocol}: {each.name}: proved, and seed {each.seed} goes wrong")
    counts = Counter(each.verdict for each in found)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    print(f"{len(found)} mutants: {summary}; {time.monotonic() - began:.0f} s")
    if told.write is not None:
        told.write.write_text(page(found, _command(told), told.seeds))
    return 1 if wrong or not found else 0


def _command(told: argparse.Namespace) -> str:
    only = f" --only '{told.only}'" if told.only else ""
    seeds = f" --seeds {told.seeds}"
    return f"python -m gemmlink.conformance.mutation_table --write {told.write}{only}{seeds}"


if __name__ == "__main__":
    sys.exit(main())
