"""Systems of others, played by small scripts that a real environment's Python runs."""

from __future__ import annotations

import shutil
import subprocess
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from kvboost.bench import peers
from kvboost.bench.peers import Peer, PeerError, find_peers, install
from kvboost.errors import ConfigError

LOUD = """
import os, sys, time
from peer_protocol import serve

class Engine:
    def __init__(self, model, dtype, window):
        print("loading")
        self.version, self.note = "1.2", f"{dtype} {window} {os.environ['OMP_NUM_THREADS']}"

    def answer(self, ids, text, n, first):
        print("noise" * 10_000)
        os.write(1, b"more of it\\n")
        os.system("echo and a child of it")
        if text == "bad":
            raise RuntimeError("out of luck")
        first(7)
        time.sleep(0.5)
        return {"text": text + "!", "ids": ids[:n], "cached": len(ids) - 1}

serve(Engine)
"""
STDIO = """
import json, sys, time
def say(**told):
    print(json.dumps(told), flush=True)
def read():
    return json.loads(sys.stdin.readline())["id"]
"""
READY = STDIO + "say(ready=True)\n"
Play = Callable[[str], Peer]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers") / "fake"
    venv.create(folder, symlinks=True)
    return folder


@pytest.fixture
def play(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """A peer whose adapter is that script."""
    shutil.copy(peers.ADAPTERS / "peer_protocol.py", tmp_path)
    (tmp_path / "config.json").touch()
    (tmp_path / "fake.txt").touch()
    monkeypatch.setattr(peers, "ADAPTERS", tmp_path)

    def made(script: str) -> Peer:
        (tmp_path / "fake.py").write_text(script, encoding="utf-8")
        return Peer("fake", home, str(tmp_path), "float16", 512)

    return made


def test_the_first_token_is_timed_when_it_comes_and_noise_is_not_heard(play: Play) -> None:
    with play(LOUD) as peer:
        answer = peer.ask([1, 2, 3], "to you", 2)
        assert (answer.text, answer.ids, answer.cached) == ("to you!", [1, 2], 2)
        assert answer.ttft + 0.3 <= answer.total  # of 0.5: this process may see the first one late
        assert peer.version == "1.2"
        assert peer.note.startswith("float16 512 ")
        assert peer.ask((4,), "again", 1).text == "again!"


def test_loading_is_not_on_the_clock(play: Play) -> None:
    with play(LOUD.replace('print("loading")', "time.sleep(0.5)")) as peer:
        start = time.perf_counter()
        answer = peer.ask([1], "x", 1)
        assert time.perf_counter() - start - answer.total >= 0.5


def test_after_an_error_it_is_asked_again(play: Play) -> None:
    with play(LOUD) as peer:
        with pytest.raises(PeerError, match=r"^fake: RuntimeError: out of luck$"):
            peer.ask([1], "bad", 1)
        assert peer.ask([1], "good", 1).text == "good!"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "raise SystemExit('no such model')",
            "fake ended with exit code 1; its last words: no such model",
        ),
        ("print('hello')", "fake wrote 'hello"),
        (STDIO + "say(version='1')", "without a 'ready'"),
        (READY, "fake ended with exit code 0$"),
        (READY + "read(); sys.exit('out of memory\\n\\n')", "its last words: out of memory"),
        (READY + "read(); print('hello')", "fake wrote 'hello.*not its answer"),
        (READY + "read(); print(3)", "fake wrote '3.*not its answer"),
        (READY + "read(); say(id=5, token=1)", "not its answer"),
        (READY + "n = read(); say(id=n, text='')", "without a 'token'"),
        (READY + "n = read(); say(id=n, token=1)", "fake ended with exit code 0$"),
        (READY + "n = read(); say(id=n, token=1); say(id=n, token=2)", "without a 'text'"),
    ],
)
def test_a_peer_that_breaks_off_fails_and_is_not_tried_again(
    play: Play, script: str, message: str
) -> None:
    with play(script) as peer:
        for _ in range(2):
            with pytest.raises(PeerError, match=message):
                peer.ask([1], "x", 1)


def test_a_silent_peer_is_ended(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_S", 0.2)
    with play(READY + "read(); time.sleep(60)") as peer:
        peer.start()
        start = time.perf_counter()
        with pytest.raises(PeerError, match=r"did not answer in 0\.2 s"):
            peer.ask([1], "x", 1)
        assert time.perf_counter() - start < 30
    monkeypatch.setattr(peers, "START_S", 0.2)
    with play("import time; time.sleep(60)") as peer, pytest.raises(PeerError, match="did not"):
        peer.start()


def test_closing_ends_it_even_if_it_does_not_listen(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CLOSE_S", 0.2)
    peer = play(READY + "time.sleep(60)")
    peer.start()
    process = peer._process
    assert process is not None
    peer.close()
    peer.close()
    assert process.returncode != 0
    with pytest.raises(PeerError, match="fake is closed"):
        peer.ask([1], "x", 1)


def test_one_that_is_not_there_can_not_start(play: Play, tmp_path: Path) -> None:
    play("")
    with (
        Peer("fake", tmp_path / "nowhere", str(tmp_path)) as peer,
        pytest.raises(PeerError, match="can't be started"),
    ):
        peer.start()


def test_llama_cpp_wants_a_gguf_file(tmp_path: Path) -> None:
    peer = Peer("llamacpp", tmp_path, str(tmp_path))
    with pytest.raises(PeerError, match="reads GGUF files only"):
        peer.start()
    assert Peer("llamacpp", tmp_path, "default")._given_model().endswith(".gguf")


def test_every_adapter_has_its_requirements_and_may_be_installed() -> None:
    scripts = {path.stem for path in peers.ADAPTERS.glob("*.py")} - {"peer_protocol"}
    assert scripts == set(peers.known_peers()) >= peers.GGUF | set(peers.BARE)


def test_installed_peers_are_found_once_whole(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play("")
    folder, commands, code = tmp_path / "installed", list[str](), 0

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        commands.append(" ".join(command))
        (folder / "fake").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(peers, "BARE", {"fake": "fake==1.0"})
    assert install("fake", folder) == folder / "fake"
    assert find_peers(folder) == {"fake": folder / "fake"}
    assert [" venv " in commands[0], "fake.txt" in commands[1]] == [True, True]
    assert commands[2].endswith("--no-deps fake==1.0")
    (tmp_path / "fake.txt").write_text("more==1.0\n", encoding="utf-8")
    assert find_peers(folder) == {}, "what is installed is of another version"
    code = 1
    with pytest.raises(PeerError, match="fake can't be installed"):
        install("fake", folder)
    assert find_peers(folder) == {}
    with pytest.raises(ConfigError, match="known are fake"):
        install("other", folder)


def test_where_peers_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVBOOST_PEERS", str(tmp_path))
    assert peers.peers_folder() == tmp_path
    monkeypatch.delenv("KVBOOST_PEERS")
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    assert peers.peers_folder() == tmp_path / "peers"
