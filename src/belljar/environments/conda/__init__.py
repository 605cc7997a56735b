"""Packages and environments of conda: channels, solver, prefixes and locks."""
