"""One module per verb, imported when the verb is used.

Must not know: each other.
"""
