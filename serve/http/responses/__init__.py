"""OpenAI's Responses API over the chat pipeline, with its memory bounded.

Must not know: other APIs.
"""
