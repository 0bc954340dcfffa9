"""The backend layer: who multiplies.

| module | what |
| --- | --- |
| ``eager`` | backend: torch's own product; runs everywhere, the reference for the others |
| ``widened`` | 16-bit inputs multiplied in float32, block by block |
| ``processor`` | what this machine's processor multiplies by itself |

A backend imports ``gemmlink.spec`` and ``gemmlink.errors`` only. It never sees a schedule or an
epilogue: the core walks the schedule and calls ``multiply``.
"""

if __name__ != "gemmlink.backends":
    raise ImportError(
        f"import gemmlink.backends, not {__name__}: two names would make two copies of every class"
    )
