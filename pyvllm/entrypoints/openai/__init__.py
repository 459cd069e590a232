"""`python -m pyvllm.entrypoints.openai.api_server`."""
