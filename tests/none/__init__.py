"""Tests that need no device and no second rank started by a launcher."""
