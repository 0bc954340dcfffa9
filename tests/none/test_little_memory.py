"""A process that may not map more memory hears so in the library's own words."""

from __future__ import annotations

import pytest

import gemmlink
from gemmlink.conformance.windows import little_memory
from gemmlink.errors import Unavailable


@pytest.mark.parametrize("result", ["copy", "view"])
def test_a_window_that_cannot_be_mapped_names_size_and_remedy(result: str) -> None:
    """Both ways of mapping: each rank's segment, and one range over two segments."""
    op = gemmlink.GemmAllGather(4096, 16, 8192, group=gemmlink.SELF, epilogue="pull", result=result)
    with little_memory(), pytest.raises(Unavailable, match=r"\d{9} bytes .*\(ulimit -v\)"):
        op.prepare()
    op.close()
