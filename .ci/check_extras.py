"""No extra of gemmlink may move the torch or the triton that torch itself chose.

Each extra is resolved, not installed, together with the torch of constraints.txt, as for Python
3.11 on x86-64 Linux, and compared with that torch alone.

`--self-test` checks the check: an invented extra that pins another triton must be caught.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
WATCHED = ("torch", "triton")
INVENTED = {"invented": ["triton==3.0.0"]}


def resolve(uv: str, requirements: list[str]) -> dict[str, str]:
    """Version by name of all that `requirements` install; RuntimeError when nothing fits."""
    target = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    plain = ["--quiet", "--no-header", "--no-annotate", "--no-config"]
    done = subprocess.run(
        [uv, "pip", "compile", *plain, *target, "-"],
        input="\n".join(requirements),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    pins = (line.split(";")[0].strip().split("==") for line in done.stdout.splitlines())
    return {pin[0]: pin[1] for pin in pins if len(pin) == 2}


def moved(uv: str, torch: str, extras: dict[str, list[str]]) -> list[str]:
    """One sentence for each extra that does not leave torch and triton alone."""
    alone = resolve(uv, [torch])
    print(f"{torch} alone: {_versions(alone)}")
    complaints = []
    for name, requirements in extras.items():
        try:
            together = resolve(uv, [torch, *requirements])
        except RuntimeError as reason:
            complaints.append(f"{name} {requirements} does not fit {torch}: {reason}")
            continue
        print(f"{name} {requirements}: {_versions(together)}")
        if any(alone.get(package) != together.get(package) for package in WATCHED):
            complaints.append(f"{name} moves {_versions(alone)} to {_versions(together)}")
    return complaints


def _versions(pins: dict[str, str]) -> str:
    return ", ".join(f"{package} {pins.get(package, 'absent')}" for package in WATCHED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--uv", default="uv", help="the uv to resolve with")
    parser.add_argument("--self-test", action="store_true", help="expect an invented extra to fail")
    arguments = parser.parse_args()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = INVENTED if arguments.self_test else project["optional-dependencies"]
    complaints = moved(arguments.uv, torch, extras)
    if arguments.self_test:
        print(f"caught, as it must be: {complaints}" if complaints else "")
        sys.exit(0 if complaints else "the invented extra was not caught")
    sys.exit("\n".join(complaints) or 0)


if __name__ == "__main__":
    main()
