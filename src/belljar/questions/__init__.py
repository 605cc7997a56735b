"""Questions to people: what a question is, which answers fit, and where it waits until somebody answers."""
