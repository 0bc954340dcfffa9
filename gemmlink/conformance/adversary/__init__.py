"""The adversary: runs lowered schedules as badly as the contracts allow, as often as you like.

| module | job |
| --- | --- |
| ``faults`` | what goes wrong, in words |
| ``values`` | symbolic elements, and what every rank must get |
| ``memory`` | cells, and what fences, words and kernel ends order - nothing else does |
| ``case`` | an operation, how it travels, and the M of every rank in every call |
| ``cells`` | numbers for the places that calls use |
| ``program`` | a case, compiled once for all seeds |
| ``mood`` | all that a seed decides |
| ``tasks`` | who may have a turn: strands, words and copies on their way |
| ``machine`` | runs a program, turn by turn |
| ``run`` | a run, or many, and what came of them |
| ``trouble`` | who fails or refuses, in which call, and how |
| ``recovery`` | calls that end badly: all hear of it, leave the call or reset, and go on |
| ``sweep`` | everything built in, as cases |

Imports go from the top of this table to its bottom. Only ``gemmlink.spec`` is needed.
"""
