"""Routes about the server itself: health, models, metrics, the page, the operator's switches.

Must not know: how answers are made.
"""
