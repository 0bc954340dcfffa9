"""What this distribution offers to gemmlink. Listing it imports neither part."""

from __future__ import annotations

from gemmlink.plugins import Entry, hookimpl


@hookimpl
def gemmlink_transports() -> list[Entry]:
    """Memory-mapped files."""
    return [Entry("directory", "gemmlink_example.transport:Directory", "transport")]


@hookimpl
def gemmlink_epilogues() -> list[Entry]:
    """Pulling in pairs."""
    return [Entry("pairwise", "gemmlink_example.epilogue:Pairwise", "epilogue")]
