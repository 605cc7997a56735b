"""HTTP: the app and its guards, who is calling, the HTTP API, and what operators read."""
