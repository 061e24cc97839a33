"""What all tests share: an offline environment and the embedded model, loaded once."""

from __future__ import annotations

import os

# Read by huggingface_hub and tokenizers when they are imported, hence before everything else.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvboost import hub, profiles


@pytest.fixture(scope="session", autouse=True)
def no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was calibrated on this machine decides nothing here."""
    home = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "kvboost_home", lambda: home)
        yield


@pytest.fixture(scope="session")
def default_model() -> tuple[Any, Any]:
    """The embedded model in fp32 and its tokenizer; shared, so leave it as it was."""
    return hub.load("default", torch.float32, "cpu")
