"""The nouns of a benchmark: a request of a workload, and how a workload is kept in a file.

Knows nothing of models or systems.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvboost.errors import ConfigError
from kvboost.types import Document


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a workload: chat messages, and documents that go before the last of them.

    gold: the right answer, an option's label or a text ("": nobody knows it). options: the labels
    of a multiple choice. stale: what one answers who has only seen the text before its edit.
    bucket: the length it was made for, in tokens. session: requests that belong together, such as
    the turns of a chat. donor: run so that its text is stored, and left out of every figure.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    documents: tuple[Document, ...] = ()
    gold: str = ""
    options: tuple[str, ...] = ()
    stale: str = ""
    bucket: int = 0
    session: str = ""
    donor: bool = False


def write_requests(requests: Iterable[Request], path: Path) -> None:
    """One JSON object a line, with the fields of `Request`."""
    lines = (json.dumps(asdict(request), ensure_ascii=False) + "\n" for request in requests)
    path.write_text("".join(lines), encoding="utf-8")


def read_requests(path: Path) -> list[Request]:
    """Raises ConfigError, naming file and line, for what `write_requests` would not write."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            fields = json.loads(line)
            fields["messages"] = tuple(fields["messages"])
            fields["documents"] = tuple(Document(**d) for d in fields.get("documents", ()))
            fields["options"] = tuple(fields.get("options", ()))
            requests.append(Request(**fields))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}, line {number} is no request: {error}") from error
    return requests
