"""What this machine's processor multiplies by itself."""

from __future__ import annotations

from functools import lru_cache

import torch

#: Flags of /proc/cpuinfo for instructions that multiply 16-bit numbers into float32 sums, which
#: torch's oneDNN uses. Measured where ``amx_bf16`` and ``avx512_fp16`` were present; see
#: docs/measurements. Without them torch's own 16-bit product is several times slower than float32.
_FLAGS = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16"),
}


def multiplies(dtype: torch.dtype) -> bool:
    """Whether torch's product of two CPU tensors of a 16-bit ``dtype`` uses such instructions."""
    return bool(torch.backends.mkldnn.enabled) and _has_instructions(dtype)


@lru_cache(maxsize=len(_FLAGS))
def _has_instructions(dtype: torch.dtype) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and not _flags().isdisjoint(_FLAGS[dtype])


def _flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()
