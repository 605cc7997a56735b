"""Everything a session is given when it starts: an environment, a sandbox with its services, and a kernel."""
