"""Text to ids and back: tokenizer, chat templates, detokenizer, stop strings.

Must not know: HTTP, engines.
"""
