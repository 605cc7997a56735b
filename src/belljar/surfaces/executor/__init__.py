"""The `executor` surface: code is kept in files, and each run is a fresh sandboxed process in a chosen environment."""
