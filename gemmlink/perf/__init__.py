"""Measuring: what every mode costs, beside what it competes with and what bounds it.

| module | job |
| --- | --- |
| ``bench`` | the protocol; measures all contestants on the ranks |
| ``contestants`` | what is measured: modes, the unfused spelling, bare products, bare moves |
| ``rows`` | makes rows of what all ranks measured |
| ``table`` | rows as text |
| ``plot`` | rows as a picture |

Imports go ``operators``, ``conformance.problems`` <- ``contestants`` <- ``bench``; ``rows`` <-
``table``, ``plot``; and all of them <- ``cli``.
"""
