"""From what the caller has (text, messages or token ids, and documents) to ids and borders.

Knows a tokenizer's documented interface, nothing of models or KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import TemplateError

from kvboost.errors import PromptError
from kvboost.types import Document, Message

PromptLike = str | Sequence[Message] | Sequence[int]
DocumentLike = str | Document | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the positions where the caller's pieces begin and end."""

    ids: tuple[int, ...]
    borders: tuple[int, ...] = ()


class PromptBuilder:
    """Renders and tokenises prompts the way transformers does: same text in, same ids out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def build(
        self,
        prompt: PromptLike,
        documents: Iterable[DocumentLike] = (),
        segments: Iterable[str | int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """Ids and borders of a prompt.

        prompt: raw text; chat messages, rendered by the tokenizer's chat template; or token ids.
        documents: context whose borders become chunk borders. Given to the chat template if it
        takes documents, else put in front of the last user message (or of the raw text) as
        "Document: TITLE", the text and an empty line each. segments: for raw text, pieces that
        occur in it in this order; for token ids, border positions. tools: JSON schemas of functions
        for the chat template; their borders become chunk borders too.

        Raises PromptError for an empty or ill-typed prompt, or pieces that are not in it.
        """
        docs = [_document(d) for d in as_list("documents", documents)]
        marks = as_list("segments", segments)
        if tools and not _is_messages(prompt):
            raise PromptError("tools need a messages prompt: a chat template renders them")
        if isinstance(prompt, str):
            blocks = plain_documents(docs)
            text, pieces = "".join(blocks) + prompt, blocks + [_text(s) for s in marks]
            built = self._tokenize(text, _spans(text, pieces, strict=True), special=True)
        elif _is_messages(prompt):
            text, pieces = self._render(cast(list[Message], list(prompt)), docs, tools)
            pieces += [_text(s) for s in marks]
            built = self._tokenize(text, _spans(text, pieces, strict=bool(marks)), special=False)
        else:
            built = _from_ids(prompt, docs, marks)
        if not built.ids:
            raise PromptError("the prompt is empty: give at least one token")
        return built

    def warm(self, document: DocumentLike) -> Prompt:
        """A document, as it stands in a prompt, behind what usually stands at the top of one: the
        chat template's own opening, or the tokenizer's first special token. The one border is
        between the two."""
        doc = _document(document)
        if not doc.text.strip():
            raise PromptError("a document to warm is empty")
        text, after = doc.text, ""
        if not self._takes(
            "documents"
        ):  # what comes after decides how its last line breaks are cut
            text, after = plain_documents([doc])[0], "Document:"
        built, sink = self._tokenize(text + after, [(0, len(text))], special=False), self._sink()
        body = built.ids[: built.borders[0]] if built.borders else built.ids
        return Prompt(sink + body, (len(sink),))

    def _sink(self) -> tuple[int, ...]:
        mark = "\u241e"
        if getattr(self._tokenizer, "chat_template", None):
            text = self._template([{"role": "user", "content": mark}], [])
            opening = self._tokenize(text.partition(mark)[0], [], special=False)
        else:
            opening = self._tokenize("", [], special=True)
        return opening.ids or (next(iter(self._tokenizer.all_special_ids), 0),)

    def decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _render(
        self, messages: list[Message], docs: list[Document], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[str]]:
        """The text, and pieces of it in their order."""
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            raise PromptError(
                "this tokenizer has no chat template, so it can't render messages: "
                "pass the prompt as text"
            )
        if tools and not self._takes("tools"):
            raise PromptError(
                "the model's chat template knows no tools: describe them in a message"
            )
        functions = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        if docs and not self._takes("documents"):
            blocks = plain_documents(docs)
            return self._template(_with_documents(messages, blocks), [], tools), functions + blocks
        return self._template(messages, docs, tools), [*functions, *(d.text for d in docs)]

    def _takes(self, what: str) -> bool:
        """Whether the chat template has a place for it."""
        return what in str(getattr(self._tokenizer, "chat_template", None))

    def _template(
        self,
        messages: list[Message],
        docs: list[Document],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        if docs:
            options["documents"] = [{"title": d.title, "text": d.text} for d in docs]
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, TypeError) as error:
            raise PromptError(
                f"the model's chat template refuses these messages ({error}): "
                "give each a role and a text as content"
            ) from error
        return str(text)

    def _tokenize(self, text: str, spans: list[tuple[int, int]], *, special: bool) -> Prompt:
        """The template writes its own special tokens; raw text gets the tokenizer's."""
        fast = bool(spans) and getattr(self._tokenizer, "is_fast", False)
        out = self._tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=fast, verbose=False
        )
        ids = tuple(out["input_ids"])
        if not fast:
            return Prompt(ids)
        starts = [start for start, _ in out["offset_mapping"]]
        borders = {_first_at(starts, place) for span in spans for place in span}
        return Prompt(ids, tuple(sorted(borders - {0, len(ids)})))


def as_list(name: str, given: Any) -> list[Any]:
    """What the caller gave as a list; a single item may come alone."""
    if isinstance(given, str | Mapping | Document):
        return [given]
    if not isinstance(given, Iterable):
        raise PromptError(f"{name} are a list, not {given!r:.80}")
    return list(given)


def plain_documents(documents: Sequence[Document]) -> list[str]:
    """The form documents take where the chat template has none for them. Without numbers, so that
    a document's text does not depend on its place; its title moves with it."""
    return [
        (f"Document: {d.title}\n" if d.title else "Document:\n") + d.text + "\n\n"
        for d in documents
    ]


def _with_documents(messages: list[Message], blocks: list[str]) -> list[Message]:
    users = [n for n, m in enumerate(messages) if m.get("role") == "user"]
    if not users or not isinstance(messages[users[-1]].get("content"), str):
        raise PromptError("documents go before the last user message: give one, with text content")
    last = dict(messages[users[-1]])
    last["content"] = "".join(blocks) + str(last["content"])
    return [*messages[: users[-1]], last, *messages[users[-1] + 1 :]]


def _document(given: DocumentLike) -> Document:
    if isinstance(given, Document):
        return given
    if isinstance(given, str):
        return Document(given)
    if isinstance(given, Mapping) and isinstance(given.get("text"), str):
        if unknown := set(given) - {"title", "text"}:
            raise PromptError(f"unknown document field {sorted(unknown)}: use title and text")
        return Document(given["text"], str(given.get("title") or ""))
    raise PromptError(f"a document is a text or {{'title', 'text'}}, not {given!r:.80}")


def _text(segment: str | int) -> str:
    if not isinstance(segment, str):
        raise PromptError(f"segments of a text prompt are texts, not {segment!r}")
    return segment


def _spans(text: str, pieces: Sequence[str], *, strict: bool) -> list[tuple[int, int]]:
    """Where the pieces stand in the text, looked for one after the other. A template may rewrite a
    document; then it gets no borders and is left to content-defined ones."""
    spans, at = [], 0
    for piece in pieces:
        found = text.find(piece, at)
        if found >= 0:
            at = found + len(piece)
            spans.append((found, at))
        elif strict:
            raise PromptError(
                f"this segment is not in the prompt after the ones before: {piece!r:.80}"
            )
    return spans


def _first_at(starts: Sequence[int], place: int) -> int:
    """The first token that begins at or after this character."""
    return next((n for n, start in enumerate(starts) if start >= place), len(starts))


def _is_messages(prompt: object) -> bool:
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(m, Mapping) for m in prompt)
    )


def _from_ids(prompt: object, docs: Sequence[Document], marks: Sequence[str | int]) -> Prompt:
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], list):
        listed = listed[0]  # a batch of one, as tokenizers return it
    if not isinstance(listed, list | tuple) or not all(type(t) is int and t >= 0 for t in listed):
        raise PromptError(
            f"a prompt is a text, a list of messages or a list of token ids, not {prompt!r:.80}"
        )
    if docs:
        raise PromptError("documents need a text or messages prompt; mark ids with segments")
    if not all(type(m) is int and 0 <= m <= len(listed) for m in marks):
        raise PromptError("segments of a token id prompt are positions in it")
    return Prompt(tuple(listed), tuple(sorted({int(m) for m in marks} - {0, len(listed)})))
