"""LangChain's ChatOpenAI against a running server: python langchain_client.py URL"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Person(BaseModel):
    name: str
    age: int


def main(url: str) -> None:
    chat = ChatOpenAI(
        base_url=url,
        api_key=SecretStr("none"),
        model="default",
        temperature=0,
        max_completion_tokens=40,
        stream_usage=True,
    )
    asked = [("system", "Answer shortly. " * 40), ("human", "What is the capital of France?")]
    first, again = chat.invoke(asked), chat.invoke(asked)
    assert "Paris" in first.text and first.content == again.content
    assert again.usage_metadata is not None
    assert again.usage_metadata["input_token_details"]["cache_read"] > 100
    pieces = list(chat.stream(asked))
    assert len(pieces) > 3 and "".join(piece.text for piece in pieces) == first.text
    called = chat.bind_tools([weather], tool_choice="required").invoke("Weather in Oslo?")
    assert called.tool_calls[0]["name"] == "weather" and "city" in called.tool_calls[0]["args"]
    made = chat.with_structured_output(Person, method="json_schema").invoke("Ada is 36 years old.")
    assert isinstance(made, Person)
    assert len(chat.batch(["One.", "Two.", "Three."])) == 3


if __name__ == "__main__":
    main(sys.argv[1])
