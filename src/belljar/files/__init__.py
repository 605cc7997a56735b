"""The files of a session as the host sees them: read, written, listed and compared, never trusted."""
