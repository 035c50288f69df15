"""Plain records between stages: configuration, requests, plans and their results, core messages.

Must not know: torch, and whoever makes or reads them.
"""
