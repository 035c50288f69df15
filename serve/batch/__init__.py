"""Batch files in OpenAI's format: JSON lines in, JSON lines out."""
