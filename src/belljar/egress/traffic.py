"""What went through a session's proxy."""

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Counted from the proxy's start; bytes of bodies and tunnels."""

    connections: int = 0
    refusals: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.connections} connections, {self.sent_bytes} bytes out, {self.received_bytes} bytes in, "
            f"{self.refusals} refused"
        )
