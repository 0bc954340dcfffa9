"""Contracts of one module on one set of ranks: starting them takes longer than all the rest."""

from __future__ import annotations

from gemmlink.conformance import RankContract, run_together


class Together(RankContract):
    """Subclass it once in a module; the contracts derived from that class share their ranks."""

    @classmethod
    def outcomes(cls) -> dict[str, str | None]:
        """See ``RankContract``."""
        if "_outcomes" not in vars(cls):
            family = next(base for base in cls.__mro__ if Together in base.__bases__)
            run_together(*family.__subclasses__())
        return cls._outcomes
