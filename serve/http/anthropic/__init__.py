"""Anthropic's Messages API over the chat pipeline.

Must not know: other APIs.
"""
