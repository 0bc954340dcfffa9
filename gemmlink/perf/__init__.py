"""Measuring: what every mode costs, beside what it competes with and what bounds it.

| module | job |
| --- | --- |
| ``bench`` | the protocol; measures all contestants on the ranks |
| ``field`` | the problem as one rank sees it, its inputs, what each contestant must hold |
| ``modes`` | the library's own modes |
| ``rivals`` | plain torch products with the library's collective, and without |
| ``movers`` | the same bytes, moved without a product |
| ``contestants`` | who is measured |
| ``rows`` | makes rows of what all ranks measured |
| ``table`` | rows as text |
| ``plot`` | rows as a picture |

Imports go ``operators``, ``conformance.problems`` <- ``field`` <- ``modes``, ``rivals`` <-
``movers`` <- ``contestants`` <- ``bench`` <- ``rows`` <- ``table``, ``plot``; and all of them <-
``cli``.
"""
