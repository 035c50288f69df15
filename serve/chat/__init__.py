"""A conversation in the terminal, with an engine of this process or a server.

Must not know: HTTP servers, how tokens are made.
"""
