"""Hydra configuration groups and their schemas."""
