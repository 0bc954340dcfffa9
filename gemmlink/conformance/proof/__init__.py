"""The proof: that a protocol can neither lose nor mix up anything, in any order of events.

| module | job |
| --- | --- |
| ``verdict`` | what a proof says |
| ``graph`` | what comes before what, in all calls of all ranks |
| ``premises`` | what is taken for granted of a case |
| ``stuck`` | tells of those who wait for each other |
| ``clocks`` | what everybody knows at least, and what covers each use of a cell |
| ``replay`` | the values, where nothing races |
| ``races`` | all uses of a cell are ordered |
| ``resources`` | who may wait where |
| ``prove`` | the proof |
| ``protocols`` | every built-in protocol, in every variant, under a short name |
| ``survey`` | proves many of them, and mutants of them |
| ``drawing``, ``page`` | what they do, as a drawing; all of it, as a page for ``docs/`` |

Imports go from the top of this table to its bottom. What is proved is what the adversary runs:
a compiled case, ``adversary.program``.
"""

from gemmlink.conformance.proof.prove import prove
from gemmlink.conformance.proof.resources import Device, residency
from gemmlink.conformance.proof.verdict import Verdict

__all__ = ["Device", "Verdict", "prove", "residency"]
