"""The OpenAI-compatible HTTP server. `life_cycle.serve` runs it; `app.build_app` is its ASGI application."""
