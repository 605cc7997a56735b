"""The journal: every session, execution and output event, in one SQLite file."""
