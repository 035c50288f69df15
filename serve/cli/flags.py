"""Flags that every verb takes."""

FLAGS = ("-h", "--help", "--help-all", "-q", "--quiet", "--debug", "--cfg", "--version", "-V")
