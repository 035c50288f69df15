"""Custom operators, attention backends and the CPU kernel library."""
