"""Tells which implementation of a function is installed, by the fingerprint of its source text.

The source text is hashed, not an AST or byte code, because those differ between Python versions:
the same release must have the same fingerprint under Python 3.8 and 3.13.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import re
from types import CodeType, FunctionType

FINGERPRINT_LENGTH = 16
#: By the id of a code object, which is kept so that the id stays its own. Many names lead to one
#: function, and reading a large module again for each of them would take most of the activation.
_of_code: dict[int, tuple[CodeType, str | None]] = {}
_OPENING = re.compile(r"\s*(@|def\b|async\b)")


def source_fingerprint(function: object) -> str | None:
    """Returns the fingerprint of the source of *function*, or None where it cannot be known.

    None is the answer for anything that is not a plain Python function, for a function that
    somebody wrapped (``functools.wraps``, ``wrapt``) and for one whose source cannot be read
    (``.pyc`` only, frozen, made by ``exec``). Never raises.
    """
    try:
        # type(), not isinstance(): a wrapt proxy claims the class of what it wraps.
        if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
            return None
        code = function.__code__
        if id(code) not in _of_code:
            lines = _read_lines(code.co_filename, function.__globals__)
            found = _fingerprint_at(lines, code.co_firstlineno - 1, code.co_name)
            _of_code[id(code)] = (code, found)
        return _of_code[id(code)][1]
    except Exception:  # noqa: BLE001  # source may be unreadable in any way
        return None


def fingerprint_text(module_source: str, function_name: str) -> str | None:
    """Returns the fingerprint of a module-level function in *module_source*, or None if absent.

    Equal to what `source_fingerprint` gives for the installed function. Where the module defines
    the name more than once the last definition counts, as it does at run time. Raises SyntaxError
    if the text is not Python.
    """
    first_line = -1
    for node in ast.parse(module_source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function_name:
            first_line = min([node.lineno] + [d.lineno for d in node.decorator_list]) - 1
    if first_line < 0:
        return None
    return _fingerprint_at(_split(module_source), first_line, function_name)


def _fingerprint_at(lines: list[str], first: int, name: str) -> str | None:
    """Hashes the function *name* that starts, decorators included, at index *first* of *lines*."""
    block = _block_at(lines, first, name)
    if block is None:
        return None
    text = "\n".join(_dedent(block)) + "\n"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:FINGERPRINT_LENGTH]


def _block_at(lines: list[str], first: int, name: str) -> list[str] | None:
    """Returns the lines of the function that starts at index *first*, without what follows it.

    The block is grown to each line that could begin the next statement until it parses: a cut
    inside a bracket, a string or between decorator and ``def`` never does. So only the function
    is parsed, not the thousands of lines around it.
    """
    if not 0 <= first < len(lines) or not _OPENING.match(lines[first]):
        return None
    indent = _indent(lines[first])
    # An indented function needs something to be indented in; its own text stays as it is.
    opening = ["if True:"] if indent else []
    for end in range(first + 1, len(lines) + 1):
        if end < len(lines) and not _may_begin_statement(lines[end], indent):
            continue
        try:
            tree = ast.parse("\n".join(opening + lines[first:end]) + "\n")
        except (SyntaxError, ValueError):
            continue
        body = tree.body[0].body if opening else tree.body  # type: ignore[attr-defined]
        node = body[0]
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name != name:
            return None
        last = node.end_lineno or 0
        return lines[first : first + last - len(opening)]
    return None


def _may_begin_statement(line: str, indent: str) -> bool:
    """Tells whether *line* may be the first line after a block that is indented by *indent*."""
    stripped = line.strip()
    return bool(stripped) and stripped[0] != "#" and len(_indent(line)) <= len(indent)


def _dedent(block: list[str]) -> list[str]:
    """Takes the first line's indent off each line that has it (text in strings may not)."""
    indent = _indent(block[0])
    return [line[len(indent) :] if line.startswith(indent) else line for line in block]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _split(text: str) -> list[str]:
    """Returns lines as Python counts them, with trailing blanks and line ends taken off."""
    # Not splitlines(): it also splits at form feeds and other characters that end no line here.
    lines = re.split("\r\n|\r|\n", text)
    return [line.rstrip(" \t") for line in lines]


def _read_lines(filename: str, module_globals: dict[str, object]) -> list[str]:
    """Returns the source lines of a module; empty if there is no source.

    linecache also asks the module's loader, so that a function imported from a zip is read.
    """
    linecache.checkcache(filename)
    return _split("".join(linecache.getlines(filename, module_globals)))
