"""Outputs: from what a kernel reports to what a caller is shown."""
