"""``python -m gemmlink``: the commands, see ``gemmlink.cli``."""

from gemmlink.cli import main

if __name__ == "__main__":  # rank processes import this module under another name
    raise SystemExit(main())
