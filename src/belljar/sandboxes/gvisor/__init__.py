"""The `gvisor` provider: sessions run on gVisor's kernel, made for hostile programs, inside namespaces."""
