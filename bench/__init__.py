"""What belljar costs, measured beside a peer in the same run. One file a measurement; `bench/run` starts it."""
