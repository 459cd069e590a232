"""Servers under the module paths that programs written for vLLM start."""
