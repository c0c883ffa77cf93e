"""What both ends of a gRPC connection must agree on: sizes, keepalive, age, certificates.

Invariants and semantics: the message limit is one number for both ends and both directions. A client pings at most as
often as a server tolerates. Connections end at their age limit and are made anew, so that new servers get their share
(round robin over every address of the name); calls that are open then have a grace, which is longer than any single
call of Kev's client waits.

Not here: the server (``common.grpc_server``), calls (``common.grpc_calls``).
"""

from __future__ import annotations

from pathlib import Path

import grpc

from common.errors import ConfigError
from common.tls_files import TlsFiles

DEFAULT_MAX_MESSAGE_BYTES = 8_388_608
NEW_ID_KEY = "kev-new-id"
"""Metadata of a submission whose request id was made for it and not sent before: it may be refused unread."""
LONGEST_CALL_S = 60.0
"""Kev's client cuts longer waits into calls of this length."""

_AGE_GRACE_S = LONGEST_CALL_S + 30.0
_PING_EVERY_MS = 30_000
_PONG_WITHIN_MS = 10_000
_LEAST_PING_INTERVAL_MS = 10_000
_FIRST_RECONNECT_MS = 100
_LAST_RECONNECT_MS = 2_000
_LEAST_RESOLVE_INTERVAL_MS = 5_000

Options = list[tuple[str, str | int]]


def server_options(max_message_bytes: int, max_connection_age_s: float) -> Options:
    """Channel arguments of a server."""
    return [
        *_shared_options(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.max_connection_age_ms", round(max_connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", round(_AGE_GRACE_S * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
    ]


def client_options(max_message_bytes: int, server_name: str = "") -> Options:
    """Channel arguments of a client; ``server_name`` is the name in the certificate when it is not the target's."""
    override: Options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return [
        *_shared_options(max_message_bytes),
        ("grpc.lb_policy_name", "round_robin"),
        ("grpc.dns_min_time_between_resolutions_ms", _LEAST_RESOLVE_INTERVAL_MS),
        ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _LAST_RECONNECT_MS),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # Kev's own, which know what may be repeated
        *override,
    ]


def _shared_options(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", _PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", _PONG_WITHIN_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials | None:
    """Credentials of a server; None when no certificate is given: plaintext.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    if not tls.cert_file and not tls.key_file:
        if tls.ca_file:
            raise ConfigError("cluster.tls_ca_file needs cluster.tls_cert_file and cluster.tls_key_file")
        return None
    if not (tls.cert_file and tls.key_file):
        raise ConfigError("cluster.tls_cert_file and cluster.tls_key_file go together; set both")
    pair = (_read(tls.key_file, "tls_key_file"), _read(tls.cert_file, "tls_cert_file"))
    ca = _read(tls.ca_file, "tls_ca_file") if tls.ca_file else None
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a client.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    if bool(tls.cert_file) != bool(tls.key_file):
        raise ConfigError("a client's certificate and key file go together; set both or none")
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca_file, "tls_ca_file") if tls.ca_file else None,
        private_key=_read(tls.key_file, "tls_key_file") if tls.key_file else None,
        certificate_chain=_read(tls.cert_file, "tls_cert_file") if tls.cert_file else None,
    )


def _read(path: str, field: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cluster.{field}: cannot read {path}: {error.strerror}") from None
    if b"-----BEGIN " not in content:
        raise ConfigError(f"cluster.{field}: {path} holds no PEM block")
    return content
