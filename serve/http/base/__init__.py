"""What every route shares: bodies, errors, middleware, the server's state.

Must not know: single routes.
"""
