"""Sources of reward, told apart by their spelling: `file.py:function`, `http(s)://...`, else a model of the graph."""

import re

SECRET = re.compile(r"\$\{(\w+)\}")
"""`${NAME}` in an address stands for an environment variable of whoever runs snakemake."""


def is_function(source: str) -> bool:
    return ".py:" in source


def is_service(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def is_model(source: str) -> bool:
    return not (is_function(source) or is_service(source))
