"""The core: composes one transport, epilogue and backend, and runs calls.

| module | job |
| --- | --- |
| ``compose`` | chooses the three parts and checks that they fit |
| ``prepare`` | sets an operation up on all ranks: agreement, window, proof |
| ``prove`` | shows that every peer's window and words really move bytes |
| ``launch`` | a prepared operation: epoch, and what a failed call leaves behind |
| ``call`` | one call: entry record, waits, result |
| ``entry`` | the records that ranks leave at each other as they enter a call |
| ``placing`` | where the blocks of all ranks lie in a result |
| ``words`` | words bound to their places once, by the transport if it offers that |
| ``reset`` | makes a failed operation usable again |
| ``flatten`` | puts a schedule's programs in an order for one thread |
| ``interpret`` | binds actions to memory and walks them on the host |
| ``gather`` | whether a small result is copied out in one go |
| ``tickets`` | finds out, when a wait stalls, that ranks are not in the same call |
| ``library`` | the communication library behind the ``collective`` epilogue |

Imports go ``spec`` <- ``transport``, ``epilogues``, ``backends`` <- ``core`` <- ``operators``,
``api``, ``perf``, ``cli``.
"""
