"""Surfaces: what callers can say to belljar, each a thin adapter over the runtime."""
