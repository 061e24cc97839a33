"""LlamaIndex's OpenAI-like client against a running server: python llama_index_client.py URL"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main(url: str) -> None:
    llm = OpenAILike(
        model="default",
        api_base=url,
        api_key="none",
        is_chat_model=True,
        context_window=8192,
        temperature=0,
        max_tokens=30,
    )
    asked = [
        ChatMessage(role="system", content="Answer shortly."),
        ChatMessage(role="user", content="What is the capital of France?"),
    ]
    whole = llm.chat(asked).message.content or ""
    assert whole.strip(), "an answer has text"
    pieces = [piece.delta or "" for piece in llm.stream_chat(asked)]
    assert len(pieces) > 3 and "".join(pieces).strip(), pieces
    text = OpenAILike(model="default", api_base=url, api_key="none", max_tokens=8, temperature=0)
    assert text.complete("The capital of France is").text, "a continuation has text"


if __name__ == "__main__":
    main(sys.argv[1])
