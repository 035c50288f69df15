"""Views for people: the explain page, tile costs, `girih check`, graph tools.

Must not know: serving.
"""
