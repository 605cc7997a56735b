"""Every error belljar raises on purpose.

BelljarError
├── UsageError            the caller's fault: change the call
│   ├── SessionNotFound       session-not-found
│   ├── ExecutionNotFound     execution-not-found
│   ├── InvalidPath           invalid-path
│   ├── FileMissing           file-missing
│   ├── VariableMissing       variable-missing
│   ├── InvalidArgument       invalid-argument
│   ├── NoCheckpoint          no-checkpoint
│   ├── CodeRejected          code-rejected
│   ├── WorkflowInvalid       invalid-workflow
│   ├── RunNotFound           run-not-found
│   ├── SecretRefused         secret-refused
│   ├── Unauthorized          unauthorized
│   ├── OperatorNeeded        operator-needed
│   └── SettingsError         invalid-settings
│       └── PolicyError           invalid-policy
├── LimitError            a limit was reached: wait, or raise the limit
│   ├── Busy                  busy
│   ├── TooLarge              too-large
│   └── OutOfDescriptors      out-of-descriptors
└── EngineError           ours, or the host's
    ├── JournalDamaged        journal-damaged
    ├── SandboxUnavailable    sandbox-unavailable
    ├── GpuUnavailable        gpu-unavailable
    ├── EnvironmentBroken     environment-broken
    ├── KernelStartFailed     kernel-start-failed
    ├── CopyRefused           copy-refused
    ├── UpstreamFailed        upstream-failed
    ├── PluginFailed          plugin-failed
    ├── PoolUnavailable       pool-unavailable
    ├── IssuerUnreachable     issuer-unreachable
    └── KernelDied            kernel-died

Code that raises inside a session is a result, not one of these. Surfaces turn these into MCP errors or HTTP
statuses, the CLI into exit codes; nothing else does.
"""

import errno
from collections.abc import Iterator
from typing import cast


class BelljarError(Exception):
    """The fact and the value in `message`; the next action in `hint`."""

    code = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class UsageError(BelljarError):
    """The caller can mend it."""


class SessionNotFound(UsageError):
    """No such session for this caller: never made, expired, cleared, or another's."""

    code = "session-not-found"

    def __init__(self, message: str, *, hint: str = "", session_id: str = "") -> None:
        super().__init__(message, hint=hint)
        self.session_id = session_id
        """The id that the caller passed, as it can be shown."""


class ExecutionNotFound(UsageError):
    """No such execution for this caller."""

    code = "execution-not-found"


class InvalidPath(UsageError):
    """A name that leaves the session folder or cannot be a file name."""

    code = "invalid-path"


class FileMissing(UsageError):
    """A well-formed name with no regular file behind it."""

    code = "file-missing"


class VariableMissing(UsageError):
    """A session without a variable of that name."""

    code = "variable-missing"


class InvalidArgument(UsageError):
    """An argument outside what the call takes."""

    code = "invalid-argument"


class NoCheckpoint(UsageError):
    """A session cannot be rewound to where it was asked to."""

    code = "no-checkpoint"


class SecretRefused(UsageError):
    """A tool that may not be given a secret, or one that the host does not have."""

    code = "secret-refused"


class Unauthorized(UsageError):
    """Credentials missing or not accepted."""

    code = "unauthorized"


class OperatorNeeded(UsageError):
    """A decision that a rule keeps for the operators of the server."""

    code = "operator-needed"


class SettingsError(UsageError):
    """A setting that cannot be used as it stands."""

    code = "invalid-settings"


class PolicyError(SettingsError):
    """A policy file that cannot be used as it stands."""

    code = "invalid-policy"


class CodeRejected(UsageError):
    """The policy does not let this code run."""

    code = "code-rejected"


class WorkflowInvalid(UsageError):
    """A workflow that cannot be run as it is written; the message has a line for each thing that is wrong."""

    code = "invalid-workflow"


class QuestionNotFound(UsageError):
    """No such question for this caller."""

    code = "question-not-found"


class QuestionClosed(UsageError):
    """The question waits for no answer any more."""

    code = "question-closed"


class RunNotFound(UsageError):
    """No such run of a workflow for this caller."""

    code = "run-not-found"


class LimitError(BelljarError):
    """A limit was reached."""


class Busy(LimitError):
    """Too much is running or waiting already."""

    code = "busy"


class TooLarge(LimitError):
    """More bytes than the limit allows."""

    code = "too-large"


class OutOfDescriptors(LimitError):
    """The server, or the whole machine, has as many files, sockets and pipes open as it may."""

    code = "out-of-descriptors"


class EngineError(BelljarError):
    """Something of ours or of the host failed."""


class JournalDamaged(EngineError):
    """The journal's file is malformed, so what is asked for cannot be read or recorded."""

    code = "journal-damaged"


class IssuerUnreachable(EngineError):
    """The OAuth issuer at which people sign in does not answer."""

    code = "issuer-unreachable"


class SandboxUnavailable(EngineError):
    """A sandbox cannot be made, entered or restored, or its provider cannot run here."""

    code = "sandbox-unavailable"


class GpuUnavailable(EngineError):
    """A GPU that the settings name is not there, or what code needs to use it is not."""

    code = "gpu-unavailable"


class EnvironmentBroken(EngineError):
    """An environment is missing or cannot be made."""

    code = "environment-broken"


class KernelStartFailed(EngineError):
    """The kernel's process ended or stayed silent before it was ready."""

    code = "kernel-start-failed"


class CopyRefused(EngineError):
    """A running kernel cannot be forked as it is."""

    code = "copy-refused"


class UpstreamFailed(EngineError):
    """An MCP server of the toolbox could not be reached, or did not answer as the protocol has it.

    Its message and hint are for sessions too; `detail` is for the operator alone: commands, and a server's own words.
    """

    code = "upstream-failed"

    def __init__(self, message: str, *, hint: str = "", detail: str = "") -> None:
        super().__init__(message, hint=hint)
        self.detail = detail


class PluginFailed(EngineError):
    """A plugin of the operator's failed where nothing can go on without it."""

    code = "plugin-failed"


class PoolUnavailable(EngineError):
    """The Azure pool cannot be reached, refuses us, or has no room; nothing of the cell has run."""

    code = "pool-unavailable"


class KernelDied(EngineError):
    """The kernel's process is gone."""

    code = "kernel-died"


_EXPIRED, _EXPIRED_END = "SessionExpiredError: Session ", " not found or has expired. "


def expired_words(error: BelljarError) -> str:
    """Return what clients of another interpreter look for in an answer about a session that is not there."""
    return f"{_EXPIRED}{error.session_id or 'ID'}{_EXPIRED_END}" if type(error) is SessionNotFound else ""


MORE_DESCRIPTORS = "the operator can raise LimitNOFILE= of the service, or ulimit -n"
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def out_of_descriptors(error: BaseException) -> OutOfDescriptors | None:
    """Return our error for one that says that no file can be opened any more; None for any other error."""
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return next(filter(None, map(out_of_descriptors, inner)), None)
    if not isinstance(error, OSError) or error.errno not in _NO_DESCRIPTORS:
        return None
    whose = "the server has" if error.errno == errno.EMFILE else "all programs of the machine together have"
    return OutOfDescriptors(
        f"{whose} as many files and sockets open as allowed",
        hint=f"Clear sessions that are not needed, or try again in 10 seconds; {MORE_DESCRIPTORS}",
    )


def named_error(text: str, hint: str = "") -> BelljarError:
    """Return the error that "code: message" stands for, where one came as text from another process."""
    if text.startswith(_EXPIRED):
        text = text.partition(_EXPIRED_END)[2] or text
    code, _, message = text.partition(": ")
    kind = _KINDS.get(code)
    return kind(message, hint=hint) if kind is not None else EngineError(text, hint=hint)


def _below(kind: type[BelljarError]) -> Iterator[type[BelljarError]]:
    for narrower in kind.__subclasses__():
        yield narrower
        yield from _below(narrower)


_KINDS = {kind.code: kind for kind in _below(BelljarError) if "code" in vars(kind)}
