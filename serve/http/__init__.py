"""The HTTP server: the application put together, its document, its process or processes.

Must not know: how tokens are made.
"""
