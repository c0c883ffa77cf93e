"""The certificates of one end of a connection, by their files.

Not here: reading them (``common.grpc_options``), which end uses which (``common.config``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one end."""

    cert_file: str = ""
    """Own certificate chain; a client needs it only where servers ask for it."""
    key_file: str = ""
    """Private key of the certificate."""
    ca_file: str = ""
    """Whom to trust. Server: set means that clients must present a certificate. Client: empty is the system's list."""
    server_name: str = ""
    """Client only: name in the server's certificate when it is not that of the target."""
