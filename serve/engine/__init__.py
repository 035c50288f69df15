"""The engine as an event loop sees it: one asynchronous stream per request.

Must not know: HTTP.
"""
