"""The built-in parts against the contracts for plugins, and those contracts against bad parts."""
