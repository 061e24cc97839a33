"""What all tests share: an offline environment and the embedded model, loaded once."""

from __future__ import annotations

import os

# Read by huggingface_hub and tokenizers when they are imported, hence before everything else.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from typing import Any

import pytest
import torch

from kvboost import hub


@pytest.fixture(scope="session")
def default_model() -> tuple[Any, Any]:
    """The embedded model in fp32 and its tokenizer; shared, so leave it as it was."""
    return hub.load("default", torch.float32, "cpu")
