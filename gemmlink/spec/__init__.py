"""What gemmlink means: contracts and data, no behaviour that touches memory or peers.

| module | holds |
| --- | --- |
| ``contracts`` | the protocols a transport, epilogue, backend or group fulfils |
| ``problem`` | shapes and dtypes of one product, and how rows split into chunks |
| ``operations`` | an operation as phases with routes |
| ``schedule`` | actions, programs and schedules: the data an epilogue returns |
| ``lowered``, ``lower`` | the same told by what blocks and queues do; how to get there |
| ``places`` | which rows of a product and of an area of a window a region is |
| ``window`` | where words and areas lie inside a symmetric window |

Nothing here imports another layer of gemmlink except ``errors``.
"""
