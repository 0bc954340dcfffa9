"""Tests of gemmlink, filed by what they need."""
