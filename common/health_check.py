"""Asks one process whether it is healthy: by gRPC health, by HTTP, or with Redis' PING.

Invariants and semantics: healthy means that the answer came within the time limit and says so; anything else,
from a refused connection to a certificate that does not fit, is unhealthy and a reason in words. ``grpc`` is loaded
only for a gRPC target. As a program (probes of containers) it exits with 0 or 1::

    python -m common.health_check 127.0.0.1:50051 kev.v1.RouterService
    python -m common.health_check http://127.0.0.1:8765/ready

Not here: how a service decides that it is healthy.
"""

from __future__ import annotations

import argparse
import http.client
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from common.errors import ConfigError
from common.tls_files import TlsFiles

if TYPE_CHECKING:
    import grpc

DEFAULT_TIMEOUT_S = 3.0


def health_problem(
    target: str, service: str = "", *, tls: TlsFiles | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> str | None:
    """Why ``target`` is not healthy; None when it is. Blocks for ``timeout_s`` at most.

    Args:
        target: ``host:port`` (gRPC), ``http://...`` (healthy is status 200) or ``redis://host:port``.
        service: full name of the gRPC service; empty asks for the server as a whole.
        tls: for gRPC over TLS.
        timeout_s: seconds to wait for the answer.
    """
    try:
        if target.startswith("http://"):
            return _http_problem(target, timeout_s)
        if target.startswith("redis://"):
            return _redis_problem(target, timeout_s)
        return _grpc_problem(target, service, tls, timeout_s)
    except (OSError, http.client.HTTPException, ConfigError) as error:
        return str(error) or type(error).__name__


def _http_problem(url: str, timeout_s: float) -> str | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            return None if response.status == http.client.OK else f"HTTP {response.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP {error.code}"


def _redis_problem(url: str, timeout_s: float) -> str | None:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), timeout_s) as link:
        link.sendall(b"PING\r\n")
        answer = link.recv(256).decode("utf-8", "replace").strip()
    return None if answer == "+PONG" else answer or "no answer"


def _grpc_problem(target: str, service: str, tls: TlsFiles | None, timeout_s: float) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    serving = health_pb2.HealthCheckResponse.ServingStatus
    with _channel(target, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return None if answer.status == serving.SERVING else serving.Name(answer.status)


def _channel(target: str, tls: TlsFiles | None) -> grpc.Channel:
    import grpc

    from common.grpc_options import channel_credentials

    options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(target, options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.secure_channel(target, channel_credentials(tls), options)


def argument_parser() -> argparse.ArgumentParser:
    """What the program understands; deployment files are checked against it."""
    parser = argparse.ArgumentParser("python -m common.health_check", allow_abbrev=False)
    parser.add_argument("target", help="host:port (gRPC), http://... or redis://host:port")
    parser.add_argument("service", nargs="?", default="", help="gRPC service, such as kev.v1.RouterService")
    parser.add_argument("--ca", default="", metavar="FILE", help="use TLS and trust this authority")
    parser.add_argument("--cert", default="", metavar="FILE", help="certificate to show")
    parser.add_argument("--key", default="", metavar="FILE", help="key of --cert")
    parser.add_argument("--server-name", default="", help="name in the server's certificate")
    parser.add_argument("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    given = argument_parser().parse_args(arguments)
    tls = TlsFiles(ca_file=given.ca, cert_file=given.cert, key_file=given.key, server_name=given.server_name)
    problem = health_problem(given.target, given.service, tls=tls if given.ca else None, timeout_s=given.timeout_s)
    if problem is not None:
        print(f"{given.target}: {problem}", file=sys.stderr)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
