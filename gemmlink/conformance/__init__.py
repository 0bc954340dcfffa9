"""Proving that a transport, an epilogue and a backend keep their contracts together.

| module | job |
| --- | --- |
| ``problems`` | seeded inputs that every rank can rebuild, and their references in float64 |
| ``quick`` | the self-test: small whole-number problems in every mode, compared exactly |

Imports go ``spec``, ``operators`` <- ``problems`` <- ``quick``, ``perf`` <- ``cli``.
"""
