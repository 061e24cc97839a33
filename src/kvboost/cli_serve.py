"""`kvboost serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvboost.boost import KVBoost
from kvboost.errors import ConfigError
from kvboost.server.address import Address
from kvboost.server.limits import Limits

_NEEDED = ("fastapi", "llguidance", "prometheus_client", "pydantic", "uvicorn")
_ACCESS, _LIMITS, _STORE = "Access", "Limits", "Model and store"
_KERNELS = {"LRU_CACHE_CAPACITY": "32", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""On a CPU, PyTorch and oneDNN keep 1,024 kernels each, one for every shape of matrix that was met:
with the embedded model .6 GB after 700 prompts. A pass needs about seven, a step of answers too."""


Model = Annotated[
    str,
    typer.Option(
        help="'default' (the embedded SmolLM2-135M-Instruct), a Hugging Face id, a local folder, "
        "or a GGUF file.",
    ),
]
Host = Annotated[
    str, typer.Option(help="0.0.0.0 is all of this machine's.", rich_help_panel=_ACCESS)
]
Port = Annotated[int, typer.Option(min=0, max=65535, rich_help_panel=_ACCESS)]
Keys = Annotated[
    Path | None,
    typer.Option(
        "--api-keys",
        help="A file that says who may ask, and whose KV is whose: "
        '{"keys": [{"name": "alice", "key": "sk-..."}]}. For more see docs/server.md.',
        show_default="none, everybody on this machine may ask",
        rich_help_panel=_ACCESS,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Listen to other machines without keys.", rich_help_panel=_ACCESS
    ),
]
Shared = Annotated[
    str | None,
    typer.Option(
        metavar="NAMESPACE",
        help="Where all keys find KV besides their own: of common system prompts and documents. "
        "Only a key of this namespace stores there.",
        rich_help_panel=_ACCESS,
    ),
]
Slots = Annotated[
    int, typer.Option(help="Answers in the making at once.", min=1, rich_help_panel=_LIMITS)
]
Queue = Annotated[
    int,
    typer.Option(help="Requests that may wait; more get 429.", min=1, rich_help_panel=_LIMITS),
]
Seconds = Annotated[
    float, typer.Option(help="That a request may take in all.", rich_help_panel=_LIMITS)
]
PromptTokens = Annotated[
    int | None,
    typer.Option(help="Of a prompt.", show_default="the model's window", rich_help_panel=_LIMITS),
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(help="Of an answer.", show_default="the model's window", rich_help_panel=_LIMITS),
]
BodyBytes = Annotated[int, typer.Option(help="Of a request's body.", rich_help_panel=_LIMITS)]
Drain = Annotated[
    float,
    typer.Option(
        help="Seconds that requests in hand get when the server is told to stop.",
        rich_help_panel=_LIMITS,
    ),
]
MaxBytes = Annotated[int, typer.Option(help="Of KV in memory.", min=0, rich_help_panel=_STORE)]
KVFormat = Annotated[
    str,
    typer.Option(help="raw, k8v8, k8v4, k4v4, or auto.", rich_help_panel=_STORE),
]
Disk = Annotated[
    Path | None,
    typer.Option(help="A folder that keeps KV for the next start.", rich_help_panel=_STORE),
]
Remote = Annotated[
    str | None,
    typer.Option(
        help="A server to share KV with other machines: valkey://HOST:6379, or any URL that "
        "fsspec knows.",
        rich_help_panel=_STORE,
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto takes what this machine is faster at.", rich_help_panel=_STORE)
]
Device = Annotated[
    str, typer.Option(help="auto takes a GPU if there is one.", rich_help_panel=_STORE)
]
MaxDivergence = Annotated[
    float,
    typer.Option(
        help="How far from full recompute answers on moved KV may be, in nats per token.",
        rich_help_panel=_STORE,
    ),
]


def serve(
    model: Model = "default",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    keys: Keys = None,
    insecure: Insecure = False,
    shared: Shared = None,
    slots: Slots = 8,
    queue: Queue = 64,
    seconds: Seconds = 600.0,
    prompt_tokens: PromptTokens = None,
    answer_tokens: AnswerTokens = None,
    body_bytes: BodyBytes = 8 << 20,
    drain: Drain = 30.0,
    max_bytes: MaxBytes = 4 << 30,
    kv_format: KVFormat = "raw",
    disk: Disk = None,
    remote: Remote = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_divergence: MaxDivergence = 0.03,
) -> None:
    """Serve a model to many clients at once, in the way of OpenAI's API.

    Answers at /v1/chat/completions and /v1/completions; shows at / what the cache does. Listens to
    this machine alone unless told otherwise. SIGTERM and Ctrl-C let requests in hand finish.

    Examples: `kvboost serve`;
    `kvboost serve --model Qwen/Qwen2.5-1.5B-Instruct --host 0.0.0.0 --api-keys keys.json`.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f'the server needs {", ".join(missing)}: pip install "kvboost[server]"')
    address = Address(host, port, keys, shared, insecure)
    limits = Limits(slots, queue, seconds, prompt_tokens, answer_tokens, body_bytes, drain)
    serving = importlib.import_module("kvboost.server.serving")
    for name, kept in _KERNELS.items():
        os.environ.setdefault(name, kept)
    with Console(stderr=True).status(f"Loading {model!r}"):
        boost = KVBoost.from_pretrained(
            model,
            dtype=dtype,
            device=device,
            max_bytes=max_bytes,
            kv_format=kv_format,
            disk=disk,
            remote=remote,
            max_divergence=max_divergence,
        )
    with boost:
        serving.serve(boost, model, limits, address)
