"""The boundary between front ends and a core: its messages' way there, and the core's process.

Must not know: HTTP, text.
"""
