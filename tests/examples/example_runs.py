"""What tests of examples share."""

from collections.abc import Callable

Show = Callable[..., str]
KEY = "s3cret-key"
