"""Who may call over gRPC: API keys, tenants, TLS, and what health tells without any."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.api_keys import ApiKeys
from common.errors import (
    ConfigError,
    DrainingError,
    PermissionDeniedError,
    RequestNotFoundError,
    ServiceUnavailableError,
    UnauthenticatedError,
)
from common.grpc_server import GrpcServer, GrpcServerSettings
from common.tls_files import TlsFiles
from tests.integration.grpc_cluster import Cluster, Reflected, bare_channel, open_cluster

OPERATOR, ALICE, BOB = "operator-key", "alice-key", "bob-key"
SERVICES = ("router", "aggregator", "inference")
ROUTER = ("", "kev.v1.RouterService")


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Cluster]:
    """All services, with keys."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{OPERATOR}: '*'\n{ALICE}: alice\n{BOB}: bob\n")
    async with open_cluster(settings=GrpcServerSettings(api_keys_file=str(keys)), services=SERVICES) as cluster:
        yield cluster


async def test_every_method_is_denied_without_a_key(guarded: Cluster) -> None:
    """A method, reflection included, answers callers that nobody knows."""
    num_methods = 0
    for service in SERVICES:
        async with bare_channel(guarded.address(service)) as channel:
            tool = Reflected(channel, [("authorization", f"Bearer {OPERATOR}")])
            names = await tool.services()
            methods = [method for name in names for method in await tool.methods(name)]
            for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", OPERATOR),)):
                tool.metadata = metadata
                for method in methods:
                    if method.containing_service.name == "Health":
                        continue
                    num_methods += 1
                    assert await tool.code(method) is grpc.StatusCode.UNAUTHENTICATED, method.full_name
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for name in (methods[-1].containing_service.full_name, ""):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert num_methods == 3 * (6 + 4 + 3 + 3)


async def test_the_client_says_why_it_is_denied(guarded: Cluster) -> None:
    """A missing key looks like an internal error."""
    for key, told in ((None, "no API key"), ("wrong", "not known")):
        async with guarded.client(api_key=key) as client:
            await client.ready()
            with pytest.raises(UnauthenticatedError, match=told):
                await client.submit(["a"])


async def test_the_tenant_of_the_key_overrides_the_requests(guarded: Cluster) -> None:
    """A tenant submits in another's name, and shares prefixes with it."""
    async with guarded.client(api_key=ALICE) as alice, guarded.client(api_key=OPERATOR) as operator:
        found = {}
        for caller, tenant in ((alice, "bob"), (alice, ""), (operator, "bob"), (operator, "")):
            request_id = await caller.submit(["a"], tenant=tenant)
            found[caller is alice, tenant] = guarded._tenant_of(request_id)
    assert found == {(True, "bob"): "alice", (True, ""): "alice", (False, "bob"): "bob", (False, ""): ""}


async def test_a_tenant_cannot_see_or_end_anothers_request(guarded: Cluster) -> None:
    """A tenant that knows or guesses an id reads another's answers, or learns that the id is taken."""
    async with guarded.client(api_key=ALICE) as alice, guarded.client(api_key=BOB) as bob:
        request_id = await alice.submit(["secret"])
        assert (await alice.wait(request_id))[0].text == "secret"
        told = set()
        for name in (request_id, "unknown"):
            for call in (bob.poll, bob.wait, bob.cancel, lambda id_: anext(bob.stream(id_))):
                with pytest.raises(RequestNotFoundError) as refused:
                    await call(name)
                told.add(str(refused.value).replace(name, "ID"))
        assert len(told) == 1
        async with guarded.client(api_key=OPERATOR) as operator:
            assert (await operator.poll(request_id)).done


async def test_nodes_are_for_operators(guarded: Cluster) -> None:
    """A tenant's key takes a node out of service."""
    async with bare_channel(guarded.address("inference")) as channel:
        tool = Reflected(channel, [("authorization", f"Bearer {OPERATOR}")])
        methods = {method.name: method for method in await tool.methods("kev.v1.InferenceService")}
        assert (await tool.call(methods["GetNode"], {}))[0].node.node_id == "scripted-0"
        assert len((await tool.call(methods["GetIsolation"], {}))[0].report.levels) == 3
        assert (await tool.call(methods["DrainNode"], {"grace_duration": {"seconds": 3}}))[0].num_running == 0
        assert (await tool.call(methods["DrainNode"], {}))[0].num_running == 0
        guarded.node.report = None
        with pytest.raises(grpc.aio.AioRpcError) as early:
            await tool.call(methods["GetIsolation"], {})
        assert early.value.code() is grpc.StatusCode.UNAVAILABLE
        tool.metadata = (("authorization", f"bearer {ALICE}"),)
        with pytest.raises(grpc.aio.AioRpcError) as denied:
            await tool.call(methods["DrainNode"], {})
        assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert guarded.node.drains == [3.0, None]


@pytest.mark.parametrize(
    "content", ["", "[]", "key", "{}", "a b: t", "'': t", "k: 5", "k: 'a b'", "5: t", "a: [", "k:", "ключ: t"]
)
def test_a_keys_file_that_makes_no_sense_is_refused(tmp_path: Path, content: str) -> None:
    """A typing error in the keys file opens the deployment, or its keys are printed."""
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="api_keys_file"):
        ApiKeys.from_file(str(path))
    path.write_text("supersecret: 'not a tenant'")
    with pytest.raises(ConfigError) as refused:
        ApiKeys.from_file(str(path))
    assert "supersecret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.from_file(str(tmp_path / "missing.yaml"))


def test_tenants_have_their_errors() -> None:
    """A key of nobody is somebody's."""
    keys = ApiKeys({"one": "a", "two": "*"})
    assert keys.identify("one").tenant == "a" and keys.identify("two").tenant is None
    for key in (None, "", "One", "one ", "\ud83d"):
        with pytest.raises(UnauthenticatedError):
            keys.identify(key)
    with pytest.raises(PermissionDeniedError):
        keys.identify("one").require_operator()
    assert not ApiKeys() and ApiKeys().identify(None).tenant is None


async def test_reflection_can_be_switched_off() -> None:
    """An operator cannot hide the services."""
    async with open_cluster(settings=GrpcServerSettings(reflection=False), services=("router",)) as cluster:
        async with bare_channel(cluster.address("router")) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await Reflected(channel).services()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_server_is_not_serving_before_it_says_so() -> None:
    """Traffic arrives before the process behind the server is ready."""
    async with open_cluster(services=("router", "aggregator")) as cluster:
        await cluster.servers["router"].set_serving(False)
        async with cluster.client() as client:
            with pytest.raises(DrainingError, match="does not serve now"):
                await client.ready()
        async with bare_channel(cluster.address("router")) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            found = [await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5) for name in ROUTER]
            assert [health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) for answer in found] == [
                "SERVING",
                "NOT_SERVING",
            ], "the process is alive, the service is not ready"
        with pytest.raises(ConfigError, match="cannot listen"):
            await GrpcServer(GrpcServerSettings(port=cluster.ports["router"]), []).start()


# ---- TLS


@dataclass(frozen=True)
class Authority:
    """A certificate authority of the test's own."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def ca_file(self) -> str:
        return write(self.folder / f"{self.name}.ca.pem", pem(self.certificate))

    def issue(self, common_name: str) -> tuple[str, str]:
        """Certificate and key file for a name and the loopback address."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName(common_name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        certificate = build(common_name, key, self.name, self.key, names, is_ca=False)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        base = self.folder / f"{self.name}.{common_name}"
        return write(base.with_suffix(".crt.pem"), pem(certificate)), write(base.with_suffix(".key.pem"), secret)


def authority(folder: Path, name: str) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    alternative = x509.SubjectAlternativeName([x509.DNSName(name)])
    return Authority(folder, name, key, build(name, key, name, key, alternative, is_ca=True))


def build(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    names: x509.SubjectAlternativeName,
    *,
    is_ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


async def test_tls_protects_and_proves(tmp_path: Path) -> None:
    """A client talks to whoever answers, or to a TLS server in plaintext."""
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    cert_file, key_file = ours.issue("kev-server")
    settings = GrpcServerSettings(tls=TlsFiles(cert_file=cert_file, key_file=key_file))
    async with open_cluster(settings=settings) as cluster:
        for server_name in ("", "kev-server"):
            tls = TlsFiles(ca_file=ours.ca_file, server_name=server_name)
            async with cluster.client(tls=tls) as client:
                assert (await client.ask(["private"]))[0].text == "private"
        wrong = (None, TlsFiles(ca_file=theirs.ca_file), TlsFiles(ca_file=ours.ca_file, server_name="elsewhere"))
        for files in wrong:
            async with cluster.client(tls=files, patience_s=0.1) as client:
                with pytest.raises(ServiceUnavailableError):
                    await client.submit(["private"])


async def test_mutual_tls_asks_for_a_certificate(tmp_path: Path) -> None:
    """A client without a certificate, or with a foreign one, is served."""
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    cert_file, key_file = ours.issue("kev-server")
    settings = GrpcServerSettings(tls=TlsFiles(cert_file=cert_file, key_file=key_file, ca_file=ours.ca_file))
    async with open_cluster(settings=settings) as cluster:
        for issuer, welcome in ((ours, True), (theirs, False), (None, False)):
            own = issuer.issue("caller") if issuer else ("", "")
            tls = TlsFiles(ca_file=ours.ca_file, cert_file=own[0], key_file=own[1])
            async with cluster.client(tls=tls, patience_s=0.1) as client:
                if welcome:
                    assert (await client.ask(["private"]))[0].text == "private"
                    continue
                with pytest.raises(ServiceUnavailableError):
                    await client.submit(["private"])


async def test_certificate_files_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    """A missing file makes a plaintext server."""
    empty = write(tmp_path / "empty.pem", b"")
    for tls in (
        TlsFiles(cert_file=empty),
        TlsFiles(ca_file=empty),
        TlsFiles(cert_file=empty, key_file=empty),
        TlsFiles(cert_file="missing.pem", key_file="missing.pem"),
    ):
        with pytest.raises(ConfigError, match="tls_"):
            GrpcServer(GrpcServerSettings(tls=tls), [])
