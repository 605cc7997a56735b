"""Packages and environments of conda."""
