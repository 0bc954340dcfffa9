"""The device side of the core: a schedule enqueued on streams instead of walked by the host.

| module | job |
| --- | --- |
| ``layout`` | numbers that kernels and host share |
| ``kernels.cu`` | the two kernels: words, and moves |
| ``compiled`` | compiles them at run time |
| ``driver`` | the few driver calls: launches, copies, events |
| ``arguments`` | the kernels' arguments; cuts moves into launches |
| ``machine`` | what is needed of a device; the CUDA device |
| ``desk`` | device words, the record of failure, tables of words |
| ``blocks`` | cuts a schedule into launches (pure) |
| ``lanes`` | side streams as lanes |
| ``program`` | a schedule bound to all of these |
| ``call`` | one call as it is enqueued |
| ``verdict`` | a record as an exception |
| ``launch`` | a prepared operation: calls, failure, reset, close |
| ``build`` | puts them together |

Imports go down this list reversed: ``build`` imports all, ``layout`` nothing. Nothing here is
imported for CPU tensors. Why it is so: ``docs/decisions/0008-the-device-program.md``.
"""
