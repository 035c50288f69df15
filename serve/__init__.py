"""Command line, HTTP API, rendering and detokenising."""
