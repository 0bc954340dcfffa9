"""Cases that went wrong in other people's systems, each under its number; see docs/cases.md."""
