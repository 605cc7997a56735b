"""What a session gets when it starts: an environment, a sandbox with its services, and a kernel."""
