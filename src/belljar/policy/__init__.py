"""The operator's policy: which tools a session may call, which code it may run, which output callers get to see."""
