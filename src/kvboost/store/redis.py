"""Records in Redis or Valkey, shared by all machines that use the server.

`kvboost:1:e:<key>` is a record in one string; the server evicts and expires it by its own rules.
`kvboost:1:g:<parent or content>` is a sorted set of keys by time, the newest 64. It may name
records that are gone: lookups leave them out and take them off the set.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from io import BufferedReader
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from kvboost.errors import ConfigError
from kvboost.store.heads import read_fronts
from kvboost.store.tier import Record, TierError, TierUsage

_PREFIX = "kvboost:1:"
_KEPT = 64
"""Members of a group that are remembered."""
_AHEAD = 4
"""Records asked for ahead of the one being read: what the server holds in its output buffer."""
_SENDING = 1.0
"""Seconds that a write may take longer than any other call: it sends megabytes."""
_ELSEWHERE = (AskError, TryAgainError, ClusterDownError)

_Command = tuple[Any, ...]
"""A command's name, its one key, and arguments."""


class RedisTier:
    """Records in one server or, with `?cluster=true` in the URL, in a cluster.

    timeout: seconds that connecting, and each wait for more of an answer, may take. Not bounded by
    it: looking up the host's name, and an answer that keeps trickling in.
    """

    def __init__(self, url: str, timeout: float, ttl: float | None = None) -> None:
        self.name = "valkey" if url.lower().startswith("valkey") else "redis"
        self._ttl = None if ttl is None else max(1, round(ttl * 1000))
        self._reader = _Server(url, timeout, timeout)
        self._writer = _Server(url, timeout, timeout + _SENDING)
        self._reader.check()

    def find(self, groups: Sequence[bytes], limit: int) -> list[list[bytes]]:
        sets = [_group(group) for group in groups]
        members: list[list[bytes]] = [
            keys or [] for keys in self._reader.ask([("ZREVRANGE", g, 0, limit - 1) for g in sets])
        ]
        distinct = list(dict.fromkeys(key for keys in members for key in keys))
        fronts = dict(zip(distinct, self.fronts(distinct), strict=True))
        found = [[(key, fronts[key]) for key in keys] for keys in members]
        upkeep: list[_Command] = []
        for name, pairs in zip(sets, found, strict=True):
            gone = [key for key, front in pairs if front is None]
            if gone:
                upkeep.append(("ZREM", name, *gone))
            if self._ttl and len(gone) < len(pairs):
                upkeep.append(("PEXPIRE", name, self._ttl))
        self._reader.tell(upkeep)
        return [[front for _, front in pairs if front is not None] for pairs in found]

    def fronts(self, keys: Sequence[bytes]) -> list[bytes | None]:
        def heads(keys: Sequence[bytes], n: int) -> list[bytes | None]:
            return self._reader.ask([("GETRANGE", _entry(key), 0, n - 1) for key in keys])

        return read_fronts(keys, heads)

    def read(self, keys: Sequence[bytes]) -> Iterator[bytearray | None]:
        return self._reader.records([_entry(key) for key in keys])

    def write(self, record: Record) -> bool:
        name = _entry(record.key)
        written = not self._reader.ask([("EXISTS", name)])[0]
        if written:
            expiry = ("PX", self._ttl) if self._ttl else ()
            answer = self._writer.tell([("SET", name, record.front + record.body, "NX", *expiry)])[
                0
            ]
            if isinstance(answer, ResponseError):
                return False
            written = bool(answer)
        # Also if it was there: the server may have evicted a group and kept its members.
        upkeep: list[_Command] = []
        for name in (_group(record.parent), _group(record.content)):
            upkeep.append(("ZADD", name, "NX", time.time(), record.key))
            upkeep.append(("ZREMRANGEBYRANK", name, 0, -_KEPT - 1))
            if self._ttl:
                upkeep.append(("PEXPIRE", name, self._ttl))
        self._writer.tell(upkeep)
        return written

    def used(self, keys: Sequence[bytes]) -> None:
        if self._ttl:
            self._reader.tell([("PEXPIRE", _entry(key), self._ttl) for key in keys])

    def discard(self, key: bytes, flaw: str | None) -> None:
        self._reader.tell([("DEL", _entry(key))])

    def usage(self) -> TierUsage:
        return TierUsage(None, None, None)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def _entry(key: bytes) -> str:
    return f"{_PREFIX}e:{key.hex()}"


def _group(group: bytes) -> str:
    return f"{_PREFIX}g:{group.hex()}"


class _Server:
    """What a URL names, be it a cluster: finds the client for a key, and maps all errors.

    Nothing is tried twice. After an error, a cluster is asked anew who has which key. Clients are
    Any: their library is typed in part only.
    """

    def __init__(self, url: str, connect: float, silence: float) -> None:
        self._url, clustered = _client_url(url)
        self._options: dict[str, Any] = {
            "socket_connect_timeout": connect,
            "socket_timeout": silence,
            "protocol": 2,
        }
        once = Retry(NoBackoff(), 0)
        try:
            pool = ConnectionPool.from_url(self._url, retry=once, **self._options)
            pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError, RedisError):
            raise ConfigError(_MALFORMED) from None
        kwargs = pool.connection_kwargs
        self._place = f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"
        self._client = None if clustered else Redis.from_pool(pool)
        self._cluster: Any = None
        self._stale = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise ConfigError for what the user can correct. A server that is away may come yet."""
        try:
            self.ask([("EXISTS", f"{_PREFIX}check:{n}") for n in range(16)])
        except TierError as error:
            advice = _advice(error.__cause__)
            if advice:
                raise ConfigError(f"{str(error).rstrip('.')}: {advice}") from error

    def ask(self, commands: Sequence[_Command]) -> list[Any]:
        """The answer to each; None if the key holds another kind of value."""
        answers = self.tell(commands)
        with self._reached():
            for n, answer in enumerate(answers):
                if isinstance(answer, ResponseError):
                    if not str(answer).startswith("WRONGTYPE"):
                        raise answer
                    answers[n] = None
        return answers

    def tell(self, commands: Sequence[_Command]) -> list[Any]:
        """The answer to each, a ResponseError if it was refused: no room, no right."""
        answers: list[Any] = [None] * len(commands)
        with self._reached():
            for client, places in self._clients([command[1] for command in commands]):
                with client.pipeline(transaction=False) as pipe:
                    for n in places:
                        pipe.execute_command(*commands[n])
                    for n, answer in zip(places, pipe.execute(raise_on_error=False), strict=True):
                        if isinstance(answer, _ELSEWHERE):
                            raise answer
                        answers[n] = answer
        return answers

    def records(self, names: Sequence[str]) -> Iterator[bytearray | None]:
        """The records under these keys, in this order, as they arrive."""
        with self._reached(), ExitStack() as opened:
            lanes = {}
            for client, places in self._clients(names):
                lane = _records(client, [names[n] for n in places])
                lanes.update(dict.fromkeys(places, opened.enter_context(closing(lane))))
            for n in range(len(names)):
                yield next(lanes[n])

    def close(self) -> None:
        for client in (self._client, self._cluster):
            if client is not None:
                client.close()

    def _clients(self, names: Sequence[str]) -> list[tuple[Any, Sequence[int]]]:
        """Which of these keys to ask whom for."""
        if self._client is not None:
            return [(self._client, range(len(names)))]
        cluster, places = self._layout(), defaultdict(list)
        for n, name in enumerate(names):
            places[cluster.get_node_from_key(name)].append(n)
        return [(cluster.get_redis_connection(node), ns) for node, ns in places.items()]

    def _layout(self) -> Any:
        with self._lock:
            if self._cluster is None:
                once = Retry(NoBackoff(), 0)
                self._cluster = RedisCluster(url=self._url, retry=once, **self._options)
            elif self._stale:
                self._cluster.nodes_manager.initialize()
            self._stale = False
            return self._cluster

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, RedisClusterException, OSError) as error:
            self._stale = True
            raise TierError(f"{self._place}: {error}") from error


def _records(client: Any, names: Sequence[str]) -> Generator[bytearray | None, None, None]:
    """Straight from the socket into what the caller gets: three times as fast as the client's own
    parser, which copies every value twice."""
    pool = client.connection_pool
    connection = pool.get_connection()
    complete = False
    try:
        with connection._sock.makefile("rb") as answers:
            asked = 0
            for n in range(len(names)):
                while asked < min(n + _AHEAD, len(names)):
                    connection.send_command("GET", names[asked])
                    asked += 1
                yield _record(answers)
        complete = True
    finally:
        if not complete:
            connection.disconnect()
        pool.release(connection)


def _record(answers: BufferedReader) -> bytearray | None:
    line = answers.readline()
    if line.startswith(b"-WRONGTYPE"):
        return None
    if line.startswith(b"-"):
        raise ResponseError(line[1:].decode(errors="replace").strip())
    if not line.startswith(b"$") or not line.endswith(b"\r\n"):
        raise RedisConnectionError("the server closed the connection")
    size = int(line[1:])
    if size < 0:
        return None
    value = bytearray(size + 2)
    if answers.readinto(value) < len(value):
        raise RedisConnectionError("the server closed the connection")
    del value[-2:]
    return value


# -- what the user can correct

_MALFORMED = (
    "this is not the URL of a Redis or Valkey server: it looks like"
    " redis://[user:password@]host[:port][/database number][?option=value], the password's special"
    " characters percent-encoded, the options cluster=true and those of redis.connection"
)
_SCHEMES = {"redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss"}
_OURS = {"decode_responses", "protocol"}
_ADVICE = (
    (AuthenticationError, "put the right user and password into the URL, redis://user:password@…"),
    (NoPermissionError, "this user needs the rights ~kvboost:* +@read +@write +@connection"),
    (MovedError, "this is a node of a cluster, add ?cluster=true to the URL"),
    (ssl.SSLError, "the URL's ssl_ options don't fit the server's certificate"),
    (FileNotFoundError, "a file that the URL's ssl_ options name is not there"),
)


def _client_url(url: str) -> tuple[str, bool]:
    """The URL as the client library wants it, and whether it is a cluster's.

    Errors are raised without their cause, which may quote a piece of the password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port, (parts.hostname or "").encode("idna")  # raise ValueError if malformed
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(_MALFORMED) from None
    cluster = options.pop("cluster", "false")
    database = parts.path.strip("/") or "0"
    known = parts.scheme in _SCHEMES and cluster in ("true", "false") and database.isdecimal()
    if not known or options.keys() & _OURS:
        raise ConfigError(_MALFORMED)
    parts = parts._replace(scheme=_SCHEMES[parts.scheme], query=urlencode(options))
    return urlunsplit(parts), cluster == "true"


def _advice(error: BaseException | None) -> str | None:
    """What to do about an error, or one of those that led to it; None if time may mend it."""
    while error is not None:
        for kind, advice in _ADVICE:
            if isinstance(error, kind):
                return advice
        if "DB index" in str(error):
            return "the server has no database of this number"
        if "Cluster mode is not enabled" in str(error):
            return "this is a single server, leave cluster=true out of the URL"
        error = error.__cause__ or error.__context__
    return None
