"""The adversary: its memory, its machine, and what it makes of everything built in."""
