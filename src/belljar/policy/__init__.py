"""What the operator lets code do: tools it may call, code it may run, output it may give."""
