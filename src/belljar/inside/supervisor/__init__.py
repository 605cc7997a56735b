"""The supervisor's own process. It is run by Python alone, under a name of its own, and imports nothing of ours."""
