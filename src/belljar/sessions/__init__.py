"""Sessions: state that lasts, one execution after another."""
