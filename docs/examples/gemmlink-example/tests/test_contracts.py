"""Both parts keep the contracts of gemmlink: every clause of them is a test here."""

from __future__ import annotations

from gemmlink.conformance import EpilogueContract, TransportContract, WindowContract, WordsContract

DIRECTORY = "gemmlink_example.transport:Directory"
GAPS = "gemmlink_example:transport.gaps"


class TestDirectoryTransport(TransportContract):
    transport = DIRECTORY
    gaps = GAPS


class TestDirectoryWindow(WindowContract):
    transport = DIRECTORY
    gaps = GAPS


class TestDirectoryWords(WordsContract):
    transport = DIRECTORY
    gaps = GAPS


class TestPairwise(EpilogueContract):
    epilogue = "gemmlink_example.epilogue:Pairwise"
    transport = DIRECTORY
