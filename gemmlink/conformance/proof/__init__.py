"""The proof: that a protocol can neither lose nor mix up anything, in any order of events.

| module | job |
| --- | --- |
| ``verdict`` | what a proof says |
| ``protocols`` | every built-in protocol, in every variant, under a short name |
| ``survey`` | proves many of them, and mutants of them |
| ``drawing``, ``page`` | what they do, as a drawing; all of it, as a page for ``docs/`` |
"""
