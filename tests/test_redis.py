"""The shared tier on Redis or Valkey, against real servers that are full, stopped and killed."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from servers import Server, free_port
from tier_contract import TierContract, digest, framed, make_record, whole

from kvboost.errors import ConfigError
from kvboost.store.redis import RedisTier
from kvboost.store.tier import TierError

TIMEOUT = 0.5
LARGE = 1_800_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.ask("FLUSHALL")
    return shared


@pytest.fixture
def tier(server: Server) -> Iterator[RedisTier]:
    with closing(RedisTier(server.url(), TIMEOUT)) as tier:
        yield tier


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers of one's own, to be stopped or filled."""
    with ExitStack() as started:
        yield lambda **options: started.enter_context(Server(tmp_path, **options))


def fails_within(seconds: float, call: Callable[[], object]) -> None:
    start = time.monotonic()
    with pytest.raises(TierError):
        call()
    assert time.monotonic() - start < seconds


class TestContract(TierContract):
    pass


# -- records


def test_many_large_records_arrive_in_order_and_may_be_written_to(tier: RedisTier) -> None:
    records = [make_record(f"r{n}", size=LARGE) for n in range(12)]
    assert all(tier.write(r) for r in records)
    for found, r in zip(tier.read([r.key for r in records]), records, strict=True):
        assert found == whole(r) and isinstance(found, bytearray)


def test_a_reader_that_stops_early_leaves_the_connection_clean(tier: RedisTier) -> None:
    records = [make_record(f"r{n}", size=LARGE) for n in range(6)]
    assert all(tier.write(r) for r in records)
    values = tier.read([r.key for r in records])
    assert next(values) == whole(records[0])
    values.close()  # type: ignore[attr-defined]
    assert tier.fronts([records[3].key]) == [records[3].front]
    assert list(tier.read([records[5].key])) == [whole(records[5])]


@pytest.mark.parametrize("size", [0, 1800, 1900, 2048, 5000, 100_000])
def test_fronts_of_any_size(tier: RedisTier, size: int) -> None:
    digests = digest("long"), digest("root"), digest("content")
    r, small = framed(digests, b"body", bytes(size)), make_record("small", size=0)
    assert tier.write(r) and tier.write(small)
    assert tier.find([digest("root")], 2) == [[small.front, r.front]]
    assert list(tier.read([r.key, small.key])) == [whole(r), whole(small)]


def test_bytes_that_look_like_the_protocol(tier: RedisTier) -> None:
    r = replace(make_record("r"), body=b"\r\n$-1\r\n*3\r\n-ERR\r\n" + bytes(range(256)) * 40)
    assert tier.write(r) and list(tier.read([r.key])) == [whole(r)]


def test_a_discarded_record_is_gone_for_everyone(tier: RedisTier, server: Server) -> None:
    a, b = make_record("a"), make_record("b")
    assert tier.write(a) and tier.write(b)
    with closing(RedisTier(server.url(), TIMEOUT)) as other:
        other.discard(a.key, "checksum")
        other.discard(digest("unknown"), None)
    assert tier.find([a.parent], 9) == [[b.front]] and list(tier.read([a.key])) == [None]
    assert tier.write(a) and tier.find([a.parent], 9) == [[a.front, b.front]]


@pytest.mark.parametrize(
    "foreign",
    [("SET", "text"), ("SET", ""), ("SET", "ab"), ("SET", "\0\2\0\0x"), ("RPUSH", "item")],
)
def test_what_is_no_record_is_a_miss_until_it_is_discarded(
    tier: RedisTier, server: Server, foreign: tuple[str, str]
) -> None:
    r = make_record("r")
    assert tier.write(r)
    server.ask("DEL", f"kvboost:1:e:{r.key.hex()}")
    server.ask(foreign[0], f"kvboost:1:e:{r.key.hex()}", foreign[1])
    assert tier.fronts([r.key]) == [None] and tier.find([r.parent], 9) == [[]]
    assert next(tier.read([r.key])) != whole(r)
    tier.discard(r.key, "foreign")
    assert tier.write(r) and tier.find([r.parent], 9) == [[r.front]]


def test_a_group_of_another_type_is_empty(tier: RedisTier, server: Server) -> None:
    r = make_record("r")
    server.ask("SET", f"kvboost:1:g:{r.parent.hex()}", "text")
    assert tier.write(r) and tier.find([r.parent, r.content], 9) == [[], [r.front]]


# -- what the server forgets


def test_members_that_are_gone_are_left_out_and_taken_off(tier: RedisTier, server: Server) -> None:
    a, b = make_record("a"), make_record("b")
    assert tier.write(a) and tier.write(b)
    server.ask("DEL", f"kvboost:1:e:{a.key.hex()}")
    assert tier.find([a.parent, a.content], 9) == [[b.front], []]
    assert server.ask("ZRANGE", f"kvboost:1:g:{a.parent.hex()}", 0, -1) == [b.key]
    assert server.ask("EXISTS", f"kvboost:1:g:{a.content.hex()}") == 0


def test_a_record_whose_groups_are_gone_is_put_back_into_them(
    tier: RedisTier, server: Server
) -> None:
    r = make_record("r")
    assert tier.write(r)
    server.ask("DEL", f"kvboost:1:g:{r.parent.hex()}", f"kvboost:1:g:{r.content.hex()}")
    assert not tier.write(r) and tier.find([r.parent, r.content], 9) == [[r.front]] * 2


def test_groups_keep_the_newest(tier: RedisTier, server: Server) -> None:
    records = [make_record(f"r{n}", size=10) for n in range(70)]
    assert all(tier.write(r) for r in records)
    assert tier.find([digest("root")], 100) == [[r.front for r in records[:5:-1]]]
    assert server.ask("ZCARD", f"kvboost:1:g:{digest('root').hex()}") == 64
    assert tier.fronts([records[0].key]) == [records[0].front]


def test_time_to_live_counts_from_the_last_use(server: Server) -> None:
    with closing(RedisTier(server.url(), TIMEOUT, ttl=60)) as tier:
        kept, lost = make_record("kept"), make_record("lost")
        assert tier.write(kept) and tier.write(lost)
        names = server.ask("KEYS", "*")
        assert len(names) == 5 and all(50_000 < server.ask("PTTL", n) <= 60_000 for n in names)
        for name in names:
            server.ask("PEXPIRE", name, 30_000)
        tier.used([kept.key])
        assert tier.find([kept.parent], 9) == [[lost.front, kept.front]]
        renewed = {name for name in names if server.ask("PTTL", name) > 50_000}
        ours = f"kvboost:1:e:{kept.key.hex()}", f"kvboost:1:g:{kept.parent.hex()}"
        assert renewed == {name.encode() for name in ours}


def test_expired_records_are_gone(server: Server) -> None:
    with closing(RedisTier(server.url(), TIMEOUT, ttl=0.05)) as tier:
        r = make_record("r")
        assert tier.write(r)
        time.sleep(0.1)
        assert tier.find([r.parent], 9) == [[]] and list(tier.read([r.key])) == [None]
    assert server.ask("KEYS", "*") == []


def test_without_time_to_live_nothing_expires(tier: RedisTier, server: Server) -> None:
    r = make_record("r")
    assert tier.write(r)
    assert {server.ask("PTTL", name) for name in server.ask("KEYS", "*")} == {-1}


def test_a_server_that_evicts(servers: Callable[..., Server]) -> None:
    server = servers(maxmemory="30mb", maxmemory_policy="allkeys-lru")
    with closing(RedisTier(server.url(), TIMEOUT)) as tier:
        records = [make_record(f"r{n}", size=LARGE) for n in range(30)]
        assert all(tier.write(r) for r in records)
        kept = [r for r in records if tier.fronts([r.key]) != [None]]
        assert 1 < len(kept) < 20
        assert list(tier.read([r.key for r in kept])) == [whole(r) for r in kept]
        children, *variants = tier.find([digest("root"), *(r.content for r in records)], 64)
        assert {*children} <= {r.front for r in kept}
        assert all(found in ([], [r.front]) for found, r in zip(variants, records, strict=True))
        assert all(not tier.write(r) for r in kept), "in its groups, if they were evicted"
        assert tier.find([r.content for r in kept], 9) == [[r.front] for r in kept]


def test_a_full_server_keeps_what_it_has(servers: Callable[..., Server]) -> None:
    server = servers(maxmemory="10mb", maxmemory_policy="noeviction")
    with closing(RedisTier(server.url(), TIMEOUT, ttl=60)) as tier:
        records = [make_record(f"r{n}", size=LARGE) for n in range(8)]
        written = [r for r in records if tier.write(r)]
        assert 0 < len(written) < 8
        assert list(tier.read([r.key for r in written])) == [whole(r) for r in written]
        assert len(tier.find([digest("root")], 9)[0]) == len(written)
        tier.used([r.key for r in written])
        tier.discard(written[0].key, "checksum")
        assert tier.fronts([written[0].key]) == [None]


def test_a_replica_can_be_read_but_not_written(servers: Callable[..., Server]) -> None:
    server, r = servers(), make_record("r")
    with closing(RedisTier(server.url(), TIMEOUT, ttl=60)) as tier:
        assert tier.write(r)
        server.ask("REPLICAOF", "127.0.0.1", free_port())
        assert not tier.write(make_record("s"))
        assert tier.find([r.parent], 9) == [[r.front]] and list(tier.read([r.key])) == [whole(r)]


# -- who shares it


def test_another_process_sees_the_same(tier: RedisTier, server: Server) -> None:
    mine, theirs = make_record("mine"), make_record("theirs")
    assert tier.write(mine)
    program = (
        "import sys\n"
        "from tier_contract import make_record, whole\n"
        "from kvboost.store.redis import RedisTier\n"
        "tier, mine = RedisTier(sys.argv[1], 2), make_record('mine')\n"
        "assert tier.find([mine.parent], 9) == [[mine.front]]\n"
        "assert list(tier.read([mine.key])) == [whole(mine)]\n"
        "assert tier.write(make_record('theirs')) and not tier.write(mine)\n"
        "tier.close()\n"
    )
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", program, server.url()], check=True, cwd=here)
    assert tier.find([mine.parent], 9) == [[theirs.front, mine.front]]


def test_many_threads_at_once(tier: RedisTier) -> None:
    records = [make_record(f"r{n}", content=f"c{n % 4}", size=100_000) for n in range(48)]

    def work(n: int) -> bool:
        r = records[n % 48]
        tier.write(r)
        values = list(tier.read([r.key, digest("unknown"), r.key]))
        assert r.front in tier.find([r.content], 64)[0]
        return values == [whole(r), None, whole(r)]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(192)))
    assert sorted(tier.find([digest("root")], 64)[0]) == sorted(r.front for r in records)


# -- a server that fails


def test_a_killed_server_is_an_error_until_it_is_back(servers: Callable[..., Server]) -> None:
    server, r = servers(), make_record("r", size=LARGE)
    with closing(RedisTier(server.url(), TIMEOUT)) as tier:
        assert tier.write(r)
        server.kill()
        for call in (
            lambda: tier.find([r.parent], 9),
            lambda: tier.fronts([r.key]),
            lambda: list(tier.read([r.key])),
            lambda: tier.write(r),
            lambda: tier.discard(r.key, None),
        ):
            fails_within(TIMEOUT, call)
        server.start()
        assert list(tier.read([r.key])) == [None] and tier.write(r)
        assert list(tier.read([r.key])) == [whole(r)]


def test_killed_in_the_middle_of_a_read(servers: Callable[..., Server]) -> None:
    server, records = servers(), [make_record(f"r{n}", size=5 * LARGE) for n in range(6)]
    with closing(RedisTier(server.url(), TIMEOUT)) as tier:
        assert all(tier.write(r) for r in records)
        values = tier.read([r.key for r in records])
        assert next(values) == whole(records[0])
        server.kill()
        fails_within(TIMEOUT, lambda: list(values))


def test_killed_in_the_middle_of_writes(servers: Callable[..., Server]) -> None:
    server, records = servers(), (make_record(f"r{n}", size=LARGE) for n in range(1000))
    with closing(RedisTier(server.url(), TIMEOUT)) as tier:
        threading.Timer(0.2, server.kill).start()
        fails_within(10, lambda: [tier.write(r) for r in records])


def test_a_server_that_hangs_costs_one_timeout(servers: Callable[..., Server]) -> None:
    server, r = servers(), make_record("r", size=LARGE)
    with closing(RedisTier(server.url(), 0.1, ttl=60)) as tier:
        assert tier.write(r)
        server.pause()
        for _ in range(2):  # on the connection there is, then on new ones
            fails_within(0.4, lambda: tier.find([r.parent], 9))
            fails_within(0.4, lambda: tier.fronts([r.key]))
            fails_within(0.4, lambda: list(tier.read([r.key])))
            fails_within(0.4, lambda: tier.used([r.key]))
            fails_within(0.4, lambda: tier.write(r))
        server.resume()
        assert list(tier.read([r.key])) == [whole(r)]


def test_a_server_that_hangs_while_it_is_written_to(
    servers: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, r = servers(), make_record("r", size=20 * LARGE)
    with closing(RedisTier(server.url(), 0.1)) as tier:
        send = tier._writer.tell

        def pause(commands: list[tuple[object, ...]]) -> list[object]:
            server.pause()
            return send(commands)

        monkeypatch.setattr(tier._writer, "tell", pause)
        fails_within(2, lambda: tier.write(r))
        server.resume()
        assert tier.fronts([r.key]) == [None]


def test_a_server_that_comes_later(servers: Callable[..., Server]) -> None:
    server, r = servers(), make_record("r")
    server.kill()
    with closing(RedisTier(server.url(), TIMEOUT)) as tier:
        with pytest.raises(TierError, match=f"127.0.0.1:{server.port}"):
            tier.fronts([r.key])
        server.start()
        assert tier.write(r)


def test_a_host_that_does_not_exist() -> None:
    with closing(RedisTier("redis://kvboost.invalid", TIMEOUT)) as tier:
        fails_within(5, lambda: tier.find([digest("root")], 1))


# -- what the user can correct

SECRET = "s3cret/w@rd"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis://127.0.0.1:{port}", "Authentication required"),
        ("redis://:s3cret@127.0.0.1:{port}", "put the right user and password"),
        ("valkey://kv:s3cret@127.0.0.1:{port}/0", "put the right user and password"),
        ("redis://:s3cret/w@rd@127.0.0.1:{port}", "percent-encoded"),
        ("redis://:s3cret%2Fw%40rd@127.0.0.1:{port}/99", "no database of this number"),
        ("redis://:s3cret%2Fw%40rd@127.0.0.1:{port}?cluster=true", "leave cluster=true out"),
        ("redis://:s3cret%2Fw%40rd@127.0.0.1:{port}/mine", "this is not the URL"),
        ("redis://:s3cret%2Fw%40rd@127.0.0.1:{port}?socket_timeout=long", "this is not the URL"),
        ("redis://:s3cret%2Fw%40rd@127.0.0.1:{port}?nonsense=1", "this is not the URL"),
        ("redis://:s3cret%2Fw%40rd@127.0.0.1:{port}?cluster=maybe", "this is not the URL"),
        ("redis://:s3cret%2Fw%40rd@127.0.0.1:{port}?decode_responses=1", "this is not the URL"),
        ("redis://:s3cret%2Fw%40rd@127.0.0.1:99999", "this is not the URL"),
        ("redis://:s3cret%2Fw%40rd@a..b:{port}", "this is not the URL"),
        ("memcached://127.0.0.1:{port}", "this is not the URL"),
    ],
)
def test_what_is_wrong_is_said_without_the_password(
    servers: Callable[..., Server], url: str, advice: str
) -> None:
    server = servers(requirepass=SECRET)
    with pytest.raises(ConfigError, match=advice) as caught:
        RedisTier(url.format(port=server.port), TIMEOUT)
    assert "s3cret" not in "".join(map(str, causes(caught.value)))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_with_the_right_password(servers: Callable[..., Server]) -> None:
    server, r = servers(requirepass=SECRET), make_record("r")
    url = f"redis://:s3cret%2Fw%40rd@127.0.0.1:{server.port}/3?socket_keepalive=true"
    with closing(RedisTier(url, TIMEOUT)) as tier:
        assert tier.name == "redis" and tier.write(r)
        assert tier.find([r.parent], 9) == [[r.front]]
        assert "s3cret" not in repr(tier)


def test_a_password_where_none_is_needed(server: Server) -> None:
    with pytest.raises(ConfigError, match="without any password"):
        RedisTier(f"redis://:s3cret@127.0.0.1:{server.port}", TIMEOUT)


def test_a_user_without_the_right(server: Server) -> None:
    server.ask("ACL", "SETUSER", "guest", "on", ">pw", "~other:*", "+@all")
    with pytest.raises(ConfigError, match="rights ~kvboost"):
        RedisTier(f"redis://guest:pw@127.0.0.1:{server.port}", TIMEOUT)


# -- TLS: this valkey-server is built without it, so a proxy ends it


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvboost")])
    local = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    builder = builder.public_key(key.public_key()).serial_number(1).add_extension(local, False)
    builder = builder.not_valid_before(now - timedelta(2)).not_valid_after(now + timedelta(2))
    folder = tmp_path_factory.mktemp("tls")
    pem, encoding = folder / "cert.pem", serialization.Encoding.PEM
    pem.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(encoding))
    private = key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)
    return pem, folder / "key.pem"


@contextmanager
def tls_proxy(port: int, certificate: tuple[Path, Path]) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def serve(raw: socket.socket) -> None:
        try:
            with (
                context.wrap_socket(raw, server_side=True) as front,
                socket.create_connection(("127.0.0.1", port)) as back,
            ):
                other = threading.Thread(target=pump, args=(back, front))
                other.start()
                pump(front, back)
                other.join()
        except OSError:
            raw.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    raw, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=serve, args=(raw,)))
                threads[-1].start()

        threads = [threading.Thread(target=accept)]
        threads[0].start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def test_encrypted(server: Server, certificate: tuple[Path, Path]) -> None:
    records = [make_record(f"r{n}", size=LARGE) for n in range(6)]
    with tls_proxy(server.port, certificate) as port:
        url = f"valkeys://127.0.0.1:{port}"
        with closing(RedisTier(f"{url}?ssl_ca_certs={certificate[0]}", 5)) as tier:
            assert tier.name == "valkey" and all(tier.write(r) for r in records)
            assert list(tier.read([r.key for r in records])) == [whole(r) for r in records]
        with pytest.raises(ConfigError, match="ssl_ options don't fit"):
            RedisTier(url, 5)
        with pytest.raises(ConfigError, match="ssl_ options name is not there"):
            RedisTier(f"{url}?ssl_ca_certs=/nowhere.pem", 5)


# -- a cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    slots, ports = [(0, 8191), (8192, 16383)], [free_port(), free_port()]
    with ExitStack() as started:
        nodes = []
        for (first, last), port in zip(slots, ports, strict=True):
            node = Server(tmp_path_factory.mktemp("node"), cluster_enabled="yes", cluster_port=port)
            nodes.append(started.enter_context(node))
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", nodes[1].port, ports[1])
        deadline = time.monotonic() + 20
        while any(b"cluster_state:ok" not in node.ask("CLUSTER", "INFO") for node in nodes):
            assert time.monotonic() < deadline, "the cluster does not form"
            time.sleep(0.05)
        yield nodes


def test_a_cluster(cluster: list[Server]) -> None:
    records = [make_record(f"r{n}", size=10_000) for n in range(40)]
    with closing(RedisTier(cluster[0].url("?cluster=true"), 5, ttl=60)) as tier:
        assert all(tier.write(r) for r in records)
        assert list(tier.read([r.key for r in records])) == [whole(r) for r in records]
        assert tier.find([digest("root")], 64) == [[r.front for r in reversed(records)]]
        tier.used([r.key for r in records])
        tier.discard(records[0].key, None)
        assert len(tier.find([digest("root")], 64)[0]) == 39
    assert all(node.ask("DBSIZE") > 20 for node in cluster)


@pytest.mark.parametrize("node", [0, 1])
def test_one_node_of_a_cluster(cluster: list[Server], node: int) -> None:
    with pytest.raises(ConfigError, match=r"add .cluster=true"):
        RedisTier(cluster[node].url(), TIMEOUT)


def test_a_cluster_of_which_a_node_fails(cluster: list[Server]) -> None:
    with closing(RedisTier(cluster[0].url("?cluster=true"), 0.2)) as tier:
        cluster[1].pause()
        keys = [digest(f"k{n}") for n in range(50)]
        for _ in range(2):
            fails_within(2, lambda: tier.fronts(keys))
        cluster[1].resume()
        assert tier.fronts(keys) == [None] * 50


def test_a_cluster_that_is_away(servers: Callable[..., Server]) -> None:
    with closing(RedisTier(f"redis://127.0.0.1:{free_port()}?cluster=true", TIMEOUT)) as tier:
        fails_within(TIMEOUT, lambda: tier.fronts([digest("a")]))
