"""A store as configured: what is wrong is said at the start, what is right survives the process."""

from __future__ import annotations

import base64
import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import boost, tokens
from servers import Server

from kvboost import Config, ConfigError, KVBoost

SECRET = base64.b64encode(bytes(range(32))).decode()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"max_bytes": -1}, "max_bytes"),
        ({"max_bytes": 1.5}, "max_bytes"),
        ({"disk_bytes": True}, "disk_bytes"),
        ({"eviction": "fifo"}, "value, lru, gdsf"),
        ({"kv_format": "int2"}, "k8v4"),
        ({"max_divergence": 0}, "max_divergence"),
        ({"max_divergence": "small"}, "max_divergence"),
        ({"remote_timeout": float("nan")}, "remote_timeout"),
        ({"remote_ttl": -5}, "remote_ttl"),
        ({"remote": "localhost:6379"}, "valkey://"),
        ({"remote": 6379}, "valkey://"),
    ],
)
def test_nonsense_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config(**config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"disk": "/proc/nowhere"}, "folder"),
        ({"disk": "/dev/null/x"}, "folder"),
        ({"disk": "{tmp}", "disk_bytes": 1000}, "bytes"),
        ({"remote": "gopher://host"}, "gopher"),
        ({"remote": "s3://bucket/kv"}, "s3fs"),
        ({"remote": "redis://host:port"}, "URL"),
        ({"trace": "{tmp}/no/such/folder/trace"}, "trace"),
    ],
)
def test_what_cannot_be_opened_is_said_at_the_start(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    filled = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in config.items()}
    with pytest.raises(ConfigError, match=says):
        boost("llama", **filled)


def test_a_missing_password_is_said_at_the_start(tmp_path: Path) -> None:
    with Server(tmp_path, requirepass="s3cret") as server:
        with pytest.raises(ConfigError, match="password"):
            boost("llama", remote=f"valkey://127.0.0.1:{server.port}")
        boost("llama", remote=server.url()).close()


def test_a_bad_secret_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_KEY", "hunter2")
    with pytest.raises(ConfigError, match="32 bytes") as caught:
        boost("llama")
    assert "hunter2" not in str(caught.value)


def test_a_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "kvboost.store.redis", None)
    with pytest.raises(ConfigError, match=r"kvboost\[redis\]"):
        boost("llama", remote="redis://127.0.0.1:1")


def test_a_closed_server_at_the_start_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with boost("llama", remote="redis://127.0.0.1:1") as made:
        assert made.generate(tokens(100, 1), max_new_tokens=2).usage.computed == 100
        (tier,) = made.stats().tiers
        assert not tier.up and len(caplog.records) == 1


def test_close_writes_everything_and_is_not_the_end(tmp_path: Path) -> None:
    ids = tokens(300, 1)
    with boost("llama", disk=tmp_path) as made:
        wanted = made.generate(ids, max_new_tokens=8)
    assert made.generate(ids, max_new_tokens=8).token_ids == wanted.token_ids  # from memory
    with boost("llama", disk=tmp_path) as again:
        got = again.generate(ids, max_new_tokens=8)
        assert got.token_ids == wanted.token_ids and got.usage.exact == len(ids) - 1


def test_a_forgotten_one_is_closed_too(tmp_path: Path) -> None:
    ids = tokens(300, 1)
    made = boost("llama", disk=tmp_path)
    made.generate(ids, max_new_tokens=8)
    del made
    with boost("llama", disk=tmp_path) as again:
        assert again.generate(ids, max_new_tokens=1).usage.computed == 1


def test_what_is_written_is_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(300, 1)
    monkeypatch.setenv("KVBOOST_CACHE_KEY", SECRET)
    with boost("llama", disk=tmp_path) as made:
        made.generate(ids, max_new_tokens=1)
    with boost("llama", disk=tmp_path) as again:
        assert again.generate(ids, max_new_tokens=1).usage.computed == 1
    token_bytes = b"".join(i.to_bytes(4, "little") for i in ids[40:44])
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or token_bytes not in file.read_bytes()
    monkeypatch.delenv("KVBOOST_CACHE_KEY")
    with boost("llama", disk=tmp_path) as keyless:
        assert keyless.generate(ids, max_new_tokens=1).usage.computed == len(ids)
    with boost("llama", disk=tmp_path) as keyless:  # has entries of its own beside the others
        assert keyless.generate(ids, max_new_tokens=1).usage.computed == 1
    monkeypatch.setenv("KVBOOST_CACHE_KEY", SECRET)
    with boost("llama", disk=tmp_path) as again:
        assert again.generate(ids, max_new_tokens=1).usage.computed == 1
        assert not again.stats().tiers[0].flaws


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with boost("llama", disk=tmp_path / "kv") as made:
            made.generate(tokens(300, 1), max_new_tokens=1)
    finally:
        os.umask(old)
    for path in (tmp_path / "kv").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


PROCESS = """
import sys
sys.path.insert(0, {tests!r})
from families import boost, tokens
with boost("llama", **{config!r}) as made:
    done = made.generate(tokens(300, 1), max_new_tokens=8)
    print(done.usage.exact, *done.token_ids)
"""


@pytest.mark.parametrize("where", ["disk", "valkey", "file"])
def test_what_one_process_stores_another_hits(where: str, tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        config: dict[str, Any] = {
            "disk": {"disk": str(tmp_path / "kv")},
            "valkey": {"remote": server.url(), "remote_timeout": 1.0},
            "file": {"remote": f"file://{tmp_path}/objects", "remote_timeout": 1.0},
        }[where]
        code = PROCESS.format(tests=str(Path(__file__).parent), config=config)
        env = {**os.environ, "PYTHONHASHSEED": "random"}
        outputs = [
            subprocess.run(
                [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
            ).stdout.split()
            for _ in range(2)
        ]
    assert outputs[0][1:] == outputs[1][1:]
    assert [out[0] for out in outputs] == ["0", "299"]


def test_two_models_share_a_folder_and_nothing_else(tmp_path: Path) -> None:
    ids = tokens(200, 1)
    with boost("llama", disk=tmp_path) as ours:
        wanted = ours.generate(ids, max_new_tokens=4)
    with boost("qwen2", disk=tmp_path) as theirs:
        assert theirs.generate(ids, max_new_tokens=4).usage.computed == len(ids)
    with boost("llama", disk=tmp_path) as ours:
        got = ours.generate(ids, max_new_tokens=4)
        assert got.usage.computed == 1 and got.token_ids == wanted.token_ids


def test_dtypes_share_nothing(tmp_path: Path, default_model: tuple[Any, Any]) -> None:
    model, tokenizer = default_model
    with KVBoost(model, tokenizer, disk=tmp_path) as ours:
        ours.generate("A text of some words. " * 20, max_new_tokens=1)
    half = copy.deepcopy(model).to(torch.bfloat16)
    with KVBoost(half, tokenizer, disk=tmp_path) as theirs:
        usage = theirs.generate("A text of some words. " * 20, max_new_tokens=1).usage
    assert usage.exact == usage.moved == 0
