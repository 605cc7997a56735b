"""What the proxy says when it does not do what it was asked.

Most clients show the reason phrase of a refused CONNECT and nothing else of the answer, so the fact is in both.
"""


class Refused(Exception):
    """A status, the fact, and the next action. `place` is the host and port that the operator's rules forbid."""

    def __init__(self, status: int, fact: str, hint: str, *, place: str = "") -> None:
        super().__init__(fact)
        self.status = status
        self.fact = fact
        self.hint = hint
        self.place = place

    def answer(self) -> bytes:
        """The HTTP response."""
        body = f"belljar: {self.fact}.\n{self.hint}\n".encode("ascii", "backslashreplace")
        reason = f"belljar: {self.fact}".encode("ascii", "backslashreplace")
        return (
            b"HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=us-ascii\r\nContent-Length: %d\r\n"
            b"Proxy-Connection: close\r\nConnection: close\r\n\r\n%s" % (self.status, reason, len(body), body)
        )
