"""Small changes to a module, one at a time: mutmut's, and statements, conditions and answers.

mutmut's own runner puts all changes of a function beside it and chooses one when it is called: it
leaves out what is decorated, and the package must import nothing that is not its own. Here each
change is a file of its own, as somebody would have written it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_string

#: mutmut's; of arguments there are more than are worth a run, see `_calls`.
OPERATORS = [pair for pair in mutation_operators if pair[1] is not operator_arg_removal]
OPPOSITE = {
    "floor": "ceil",
    "ceil": "floor",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
}
#: Conditions that no operator of mutmut's is for.
PLAIN = (cst.Name, cst.Attribute, cst.Call, cst.Subscript)


class Mutant(NamedTuple):
    """A module with one change: where, the line before and after it, and the whole text.

    `lines` are those of the statement that was changed; `change` is how the file of reasons names
    it, for lines may move: the function, what was there and what is, numbered where it is the same
    for several places.
    """

    function: str
    lines: range
    change: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Every change to a module's source that leaves it readable."""
    visitor = _Visitor()
    wrapper = MetadataWrapper(cst.parse_module(source))
    wrapper.visit(visitor)
    seen, times = {source}, Counter[str]()
    for function, lines, node, other in visitor.found:
        text = wrapper.module.deep_replace(node, other).code
        if text not in seen and _compiles(text):
            seen.add(text)
            change = f"{function}: {_changed(source.splitlines(), text.splitlines())}"
            times[change] += 1
            numbered = f"{change} ({times[change]})" if times[change] > 1 else change
            yield Mutant(function, lines, numbered, text)


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _changed(before: list[str], after: list[str]) -> str:
    """The lines that are different, without those around them."""
    start = next(n for n, (old, new) in enumerate(zip(before, after)) if old != new)
    backwards = zip(reversed(before[start:]), reversed(after[start:]))
    same = next((n for n, (old, new) in enumerate(backwards) if old != new), 0)
    old, new = (lines[start : len(lines) - same] for lines in (before, after))
    return " -> ".join(" ".join(" ".join(lines).split()) for lines in (old, new))


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        self.found: list[tuple[str, range, cst.CSTNode, cst.CSTNode]] = []
        self.names: list[str] = []
        self.statements: list[range] = [range(0)]

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_alone(node):
            return False
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self.names.append(node.name.value)
        elif isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            self.statements.append(self._first_lines(node))
        for other in _changes(node):
            self.found.append((".".join(self.names) or "module", self.statements[-1], node, other))
        return True

    def _first_lines(self, node: cst.CSTNode) -> range:
        """Of a compound statement up to its block: what is in that has lines of its own."""
        span = self.get_metadata(PositionProvider, node)
        if isinstance(node, cst.BaseSmallStatement):
            return range(span.start.line, span.end.line + 1)
        block = self.get_metadata(PositionProvider, node.body)
        return range(span.start.line, max(span.start.line + 1, block.start.line))

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if _is_left_alone(original_node):
            return
        if isinstance(original_node, (cst.FunctionDef, cst.ClassDef)):
            self.names.pop()
        elif isinstance(original_node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            self.statements.pop()


def _is_left_alone(node: cst.CSTNode) -> bool:
    """Types, imports and decorators: other tools look after these, or nothing would import."""
    if isinstance(node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)):
        return True
    if not isinstance(node, cst.Assign) or not isinstance(node.targets[0].target, cst.Name):
        return False
    name = node.targets[0].target.value
    # `Bytes = Union[int, float]` is a name for a type.
    return name == "__all__" or (name.istitle() and isinstance(node.value, cst.Subscript))


def _changes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for kind, operator in OPERATORS:
        if isinstance(node, kind):
            changed = list(operator(node))
            # A text is changed once: in another case, too, is the same question asked again.
            yield from changed[:1] if operator is operator_string else changed
    if isinstance(node, cst.Call):
        yield from _calls(node)
    if isinstance(node, cst.Expr) and not isinstance(node.value, (cst.BaseString, cst.Yield)):
        yield cst.Pass()
    if isinstance(node, cst.Return) and node.value and not _is_name(node.value, "None"):
        space = cst.SimpleWhitespace(" ")
        yield node.with_changes(value=cst.Name("None"), whitespace_after_return=space)
    if isinstance(node, (cst.If, cst.While, cst.CompIf)) and isinstance(node.test, PLAIN):
        inner = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), inner))


def _calls(node: cst.Call) -> Iterator[cst.Call]:
    """Each argument left out or None, and the function that answers the other way round."""
    name = node.func.value if isinstance(node.func, cst.Name) else ""
    if isinstance(node.func, cst.Attribute):
        name = node.func.attr.value
    if name in ("len", "isinstance"):  # they raise
        return
    for index, argument in enumerate(node.args):
        if not argument.star and not _is_name(argument.value, "None"):
            other = argument.with_changes(value=cst.Name("None"))
            yield node.with_changes(args=[*node.args[:index], other, *node.args[index + 1 :]])
        if argument.keyword or len(node.args) - 1 == index > 0:
            yield node.with_changes(args=[*node.args[:index], *node.args[index + 1 :]])
    if name in OPPOSITE:
        other = cst.Name(OPPOSITE[name])
        is_name = isinstance(node.func, cst.Name)
        yield node.with_changes(func=other if is_name else node.func.with_changes(attr=other))


def _is_name(node: cst.BaseExpression, name: str) -> bool:
    return isinstance(node, cst.Name) and node.value == name
