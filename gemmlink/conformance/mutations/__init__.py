"""Which mistakes in which protocols who notices: ``python -m gemmlink.conformance.mutations``.

| module | job |
| --- | --- |
| ``equivalent`` | why a change that nobody notices is no mistake, in words |
| ``judge`` | protocols, their mutants, and what comes of each |
| ``page`` | the table as a page for ``docs/`` |

Imports go from the top of this table to its bottom.
"""
