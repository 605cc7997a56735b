"""TLS of the HTTP transport: the certificate and key of the settings, checked at the start, and when they end.

Azure's credential classes and several of its clients refuse `http:` addresses, so the server has to be able to speak
TLS without a proxy before it.
"""

import ssl
from datetime import UTC, datetime
from pathlib import Path

from belljar.errors import SettingsError
from belljar.settings import Settings, variable


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the context that the server speaks TLS with; None where the settings name no certificate."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if not certificate and not key:
        return None
    if not certificate or not key:
        missing = variable("tls_key" if certificate else "tls_certificate")
        raise SettingsError(f"TLS is set up in part, without {missing}", hint=f"Set {missing}")
    for name, path in (("tls_certificate", certificate), ("tls_key", key)):
        _check_readable(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password callback, OpenSSL would ask on the terminal, and the server would wait there.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        reason = error.reason or type(error).__name__
        raise SettingsError(
            f"The certificate {certificate} and the key {key} cannot be used together: {reason}",
            hint="Use PEM files that belong together, the certificate with its chain, the key without a password",
        ) from None
    return context


def certificate_end(settings: Settings) -> datetime:
    """Return when the server's own certificate ends."""
    # Imported here, because it takes 50 ms and only `belljar doctor` asks.
    from cryptography import x509

    path = Path(settings.tls_certificate)
    _check_readable("tls_certificate", str(path))
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())[0].not_valid_after_utc
    except ValueError:
        raise SettingsError(f"{path} is no certificate", hint="Use a PEM file with the whole chain") from None


def days_left(end: datetime) -> float:
    """Return in how many days a certificate ends; below 0 when it has ended."""
    return (end - datetime.now(UTC)).total_seconds() / 86_400


def _check_readable(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            return
    except OSError as error:
        raise SettingsError(
            f"{variable(name)} is {path}, which cannot be read: {error.strerror}", hint="Give the path of a PEM file"
        ) from error
