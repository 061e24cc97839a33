"""An OpenAI-compatible server around KVBoost. Only here are FastAPI and pydantic known."""
