"""Structured output: grammars that limit which tokens a request may produce."""
