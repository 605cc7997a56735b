"""The `namespace` provider: Linux namespaces made by bubblewrap, which sessions can be forked into."""
