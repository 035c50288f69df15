"""Text of a model split into content, reasoning and tool calls; one small module per format.

Must not know: HTTP.
"""
