"""The epilogue layer: how finished tiles travel, and which words announce them.

| module | epilogue |
| --- | --- |
| ``push`` | stores into every rank's window, fused with the product or after it |
| ``pull`` | every rank loads from the others' slots |
| ``lanes`` | copy engines carry the own slot to the peers |
| ``common`` | the gate, the announcements, the two ends of a call |
| ``collective`` | the communication library, after the product |

An epilogue imports ``gemmlink.spec`` only: it returns a schedule, which is data, and never touches
memory, a transport or a backend.
"""

if __name__ != "gemmlink.epilogues":
    raise ImportError(
        f"import gemmlink.epilogues, not {__name__}: two names would make two copies of every class"
    )
