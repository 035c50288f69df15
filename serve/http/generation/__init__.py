"""From a body that asks for tokens to streams of the engine; what all such routes share.

Must not know: single routes.
"""
