"""Benchmarks: fixed workloads on this engine and its peers, latency, start-up, and a running server.

`pyvllm bench --help` lists them; docs/performance.md says how to read what they print.
"""
