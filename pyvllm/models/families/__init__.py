"""One module for each group of families with like configurations: `config.json` -> `ModelSpec`."""
