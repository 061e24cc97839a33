"""Answers as server-sent events, as they come."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass

from kvboost.server.answers import Choice, Json, Shape, usage_of
from kvboost.server.errors import REFUSALS, refusal, unforeseen
from kvboost.server.job import Cancelled
from kvboost.server.work import Done, Ended, Event, Piece

log = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Chunks:
    """Writes events down. head: what every chunk begins with. usage: whether a last chunk tells
    what the request cost."""

    shape: Shape
    choices: Mapping[int, Choice]
    head: Json
    usage: bool
    request_id: str

    async def lines(self, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        """events: those after Started. An error ends the stream and is its last event but one."""
        for index in self.choices:
            if opening := self.shape.opening(index):
                yield self._chunk([opening])
        try:
            async for event in events:
                for chunk in self._told(event):
                    yield chunk
        except Cancelled:
            return
        except REFUSALS as error:
            yield _sse(refusal(error).content)
        except Exception:
            log.exception("a stream failed")
            yield _sse(unforeseen(self.request_id).content)
        yield _DONE

    def _told(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Piece | Ended):
            delta = self.choices[event.choice].take(event)
            finish, delta.finish = delta.finish, None
            if delta:
                yield self._chunk([self.shape.piece(event.choice, delta)])
            if finish:
                delta = type(delta)(finish=finish)
                yield self._chunk([self.shape.piece(event.choice, delta)])
        elif isinstance(event, Done) and self.usage:
            yield _sse({**self.head, "choices": [], "usage": usage_of(event.usage)})

    def _chunk(self, choices: list[Json]) -> bytes:
        usage: Json = {"usage": None} if self.usage else {}
        return _sse({**self.head, "choices": choices, **usage})


def _sse(content: Json) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
