"""The `gvisor` provider: sessions on a kernel of their own, made for hostile programs, inside the namespace glass."""
