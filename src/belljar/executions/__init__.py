"""Executions: one run of a cell, from its turn in the session to its result."""
