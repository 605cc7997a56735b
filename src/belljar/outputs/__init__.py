"""Outputs: from the events that a kernel reports to what callers are shown and notebooks contain."""
