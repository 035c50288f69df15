"""Shared by every folder: errors, progress events, the cache directory, the target, OpenMP.

Must not know: anything else of girih.
"""
