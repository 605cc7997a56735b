"""The `executor` surface: code kept in files, each run in a fresh sandboxed process of a chosen environment."""
