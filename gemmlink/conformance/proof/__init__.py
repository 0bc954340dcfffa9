"""The proof: that a protocol can neither lose nor mix up anything, in any order of events.

| module | job |
| --- | --- |
| ``verdict`` | what a proof says |
"""
