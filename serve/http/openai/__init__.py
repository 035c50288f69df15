"""OpenAI's generation routes: chat and text completions; token ids in and out.

Must not know: other APIs.
"""
