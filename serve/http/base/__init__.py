"""Shared by every route: bodies, errors, middleware, the server's state.

Must not know: single routes.
"""
