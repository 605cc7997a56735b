"""Workflows: lists of steps that a person can read, run in a session, outlive their server, and are run once."""
