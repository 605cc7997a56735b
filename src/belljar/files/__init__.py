"""The files of a session, which the host reads, writes, lists, copies and compares, and never trusts."""
