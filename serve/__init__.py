"""Command line, HTTP API, `LLM`, text: everything between people and the engine's boundary.

Must not know: tensors.
"""
