"""An import inside a function says in a comment on its line what it saves."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bnb_dispatch_fix"
MODULES = sorted(PACKAGE.rglob("*.py"))
#: For a tool, not for a reader.
DIRECTIVE = re.compile(r"#\s*(noqa|type:|pragma)[^#]*")


def unexplained(text):
    """(line, statement) of each import inside a function that has no comment on its lines."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    said = {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and DIRECTIVE.sub("", token.string).strip("# ")
    }
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {
        (node.lineno, ast.get_source_segment(text, node))
        for function in ast.walk(ast.parse(text))
        if isinstance(function, functions)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and said.isdisjoint(range(node.lineno, (node.end_lineno or 0) + 1))
    }
    return sorted(found)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_an_import_inside_a_function_says_what_it_saves(path):
    assert unexplained(path.read_text("utf-8")) == []


def test_what_counts_as_said():
    text = """
import os

def f():
    import json  # 25 ms
    import yaml  # noqa: F401
    import yaml  # noqa: F401  # 30 ms
    url = "#"; import re
    if url:
        from a import (  # a second
            b,
        )

        async def g():
            import torch
"""
    assert unexplained(text) == [
        (6, "import yaml"),
        (8, "import re"),
        (15, "import torch"),
    ]
