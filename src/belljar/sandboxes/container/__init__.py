"""The `container` provider: sessions in containers of docker or podman, whichever answers."""
