"""Watches a core: metrics, status line, step traces, profiles.

Must not know: how what it watches is decided.
"""
