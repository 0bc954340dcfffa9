"""Exploring: all executions of a compiled case, instead of as many as there are seeds.

| module | job |
| --- | --- |
| ``memory`` | the adversary's memory, in which every store is seen at once, and which forks |
| ``outline`` | of a program only that by which strands notice each other |
| ``walker`` | the adversary's machine, one action at a time; forks, and tells where it is |
| ``ahead`` | how far all others may get while some stand still |
| ``choices`` | of all that could be next what must be tried |
| ``search`` | tries it |
| ``sizes`` | built-in protocols, smaller ones of each, and their mutants |

Imports go from the top of this table to its bottom. Of what orders events it shares with the
adversary all, and with a proof nothing: it walks, and looks where it gets.
"""

from gemmlink.conformance.explore.search import Explored, explore

__all__ = ["Explored", "explore"]
