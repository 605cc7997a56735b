"""The limits of a session, in force: control groups where this host has them, limits of each process where not."""
