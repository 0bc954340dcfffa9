"""``gemmlink check``: proves what must hold before anything runs.

``check protocol``: that every protocol, which is an operation in a mode in a variant, can neither
lose nor mix up anything, in whatever order its events come.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemmlink.cli import arguments as words
from gemmlink.cli import output
from gemmlink.errors import InvalidArgument

if TYPE_CHECKING:
    from gemmlink.conformance.proof.protocols import Protocol
    from gemmlink.conformance.proof.survey import Noticed, Proof, Scope, Which

#: Ranks and chunks of protocols in which mistakes are made: enough for each to show.
_SMALL = 2


def add(parsers: words.Parsers) -> None:
    """Describe the command; each of its subjects is one of its own."""
    text = "Prove what must hold before anything runs."
    parser = parsers.add_parser("check", help=text, description=text)
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    _add_protocol(subjects)


def _add_protocol(subjects: words.Parsers) -> None:
    parser = words.command(
        subjects, "protocol", run,
        "Prove that every protocol is right in any order of events, or show what refutes it.",
    )  # fmt: skip
    parser.add_argument(
        "--world", type=words.at_least(2), nargs="+", metavar="N",
        help="ranks (2; 3 without pairs of epilogues; 8 for the plainest variants)",
    )  # fmt: skip
    parser.add_argument(
        "--chunks", type=words.positive, help="chunks of fused forms (8 at 2 ranks, else 2)"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT",
        help="protocols whose name, operation/mode/variant, contains this",
    )  # fmt: skip
    parser.add_argument(
        "--epilogue", type=words.names, default=("all",), metavar="NAME[,NAME...]",
        help="names, module:attribute or pairs of them; all for everything built in",
    )  # fmt: skip
    parser.add_argument(
        "--slots", type=words.positive, metavar="N",
        help="blocks that a device has room for at the same time (132)",
    )  # fmt: skip
    parser.add_argument(
        "--share", type=words.positive, default=1, metavar="N",
        help="ranks that share a device (1); their kernels have one block each",
    )  # fmt: skip
    parser.add_argument(
        "--mutants", action="store_true",
        help="make mistakes in protocols of 2 ranks and tell which ones the proof notices",
    )  # fmt: skip
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the page of everything built in"
    )


def run(arguments: argparse.Namespace) -> output.Outcome:
    """Prove what was asked for and tell."""
    if arguments.write is not None:
        return _write(arguments)
    if arguments.mutants:
        return _mutants(arguments)
    from gemmlink.conformance.proof import survey

    wanted = _wanted(arguments, _scopes(arguments))
    device = replace(survey.ROOMY, slots=arguments.slots or survey.ROOMY.slots)
    device = replace(device, ranks=arguments.share)
    found = [proof for each in wanted.values() for proof in survey.prove_all(each, device)]
    covered = [f"checked {len(each)} at {scope}" for scope, each in wanted.items() if each]
    return outcome(found, covered)


def _scopes(arguments: argparse.Namespace) -> Sequence[Scope]:
    from gemmlink.conformance.proof.survey import USUAL, Scope

    if arguments.world is None:
        return [replace(scope, chunks=arguments.chunks or scope.chunks) for scope in USUAL]
    usual = {scope.world: scope.chunks for scope in USUAL}
    return [
        Scope(world, arguments.chunks or usual.get(world, _SMALL))
        for world in dict.fromkeys(arguments.world)
    ]


def _wanted(arguments: argparse.Namespace, scopes: Sequence[Scope]) -> dict[Scope, list[Protocol]]:
    from gemmlink.conformance.proof.protocols import named

    modes = named(arguments.epilogue)
    found = {scope: scope.protocols(arguments.only, modes) for scope in scopes}
    if not any(found.values()):
        raise InvalidArgument(
            "--only is for a part of the name of a protocol, operation/mode/variant",
            f"{arguments.only!r}, which none has",
        )
    return found


def outcome(found: Sequence[Proof], covered: Sequence[str]) -> output.Outcome:
    """Right if everything is proved."""
    failed = sum(not proof.verdict.proved for proof in found)
    took = sum(proof.seconds for proof in found)
    lines = [output.header(), *(line for proof in found for line in proof.lines()), *covered]
    lines.append(f"{len(found) - failed} proved, {failed} refuted; {took:.0f} s")
    return output.Outcome(
        output.WRONG if failed else output.RIGHT,
        len(found),
        failed,
        [proof.as_dict() for proof in found],
        "\n".join(lines),
    )


# Mistakes.


def _mutants(arguments: argparse.Namespace) -> output.Outcome:
    from gemmlink.conformance.proof import survey

    if arguments.world not in (None, [_SMALL]):
        raise InvalidArgument(
            "mistakes are made in protocols of 2 ranks",
            f"--world {' '.join(map(str, arguments.world))}",
            "Omit --world.",
        )
    which: Which = "all" if arguments.only else "plainest"
    scope = survey.Scope(_SMALL, arguments.chunks or _SMALL, which)
    (wanted,) = _wanted(arguments, [scope]).values()
    whole = list(survey.prove_all(wanted))
    if any(not proof.verdict.proved for proof in whole):
        return outcome(whole, ["no mistake is looked for in what is wrong as it is"])
    return mutants(list(survey.mutate_all(wanted)))


def mutants(found: Sequence[Noticed]) -> output.Outcome:
    """Right if in each protocol something was noticed. What was not is for people to look at."""
    counts = Counter(each.result for each in found)
    caught = Counter(each.protocol for each in found if each.result == "caught")
    blind = {each.protocol for each in found} - set(caught)
    lines = [output.header(), *(each.line() for each in found)]
    lines += [f"nothing is noticed in {name}" for name in sorted(blind)]
    lines.append(f"{counts['caught']} caught, {counts['equivalent']} equivalent")
    return output.Outcome(
        output.WRONG if blind else output.RIGHT,
        len(found),
        len(blind),
        [each.as_dict() for each in found],
        "\n".join(lines),
    )


# The page.


def _write(arguments: argparse.Namespace) -> output.Outcome:
    from gemmlink.conformance.proof import page

    more = (arguments.world, arguments.chunks, arguments.only, arguments.mutants, arguments.slots)
    if any(more) or arguments.epilogue != ("all",) or arguments.share > 1:
        raise InvalidArgument("--write is about all that is built in", "more words", "Omit them.")
    made = page.build()
    arguments.write.write_text(made.text(), encoding="utf-8")
    told = outcome(made.proofs, [])
    failed = [line for proof in made.proofs if not proof.verdict.proved for line in proof.lines()]
    last = f"{arguments.write}: {told.text.splitlines()[-1]}"
    return replace(told, text="\n".join([*failed, last]))
