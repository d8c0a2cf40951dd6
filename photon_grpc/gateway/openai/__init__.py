"""The API of OpenAI, with the extensions of vLLM."""
