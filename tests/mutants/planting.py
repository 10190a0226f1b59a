"""Faults that can be planted in a source file: a sign, an axis, an off-by-one, a missing reduction.

A fault replaces a few characters of the text; nothing else of the file changes. Docstrings, annotations, error messages,
and the tests of errors are skipped: no run could notice a fault there.
"""

import ast
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

KINDS = ("sign", "axis", "off_by_one", "reduction")

_SIGNS: dict[type, str] = {ast.Add: "-", ast.Sub: "+"}
_COMPARISONS: dict[type, str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_SYMBOLS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_AXIS_KEYWORDS = frozenset({"axis", "dim", "scatter_dimension", "split_axis", "concat_axis", "in_axes", "out_axes"})
_REDUCTIONS_OF_METHODS = frozenset({"sum", "mean"})
_REDUCTIONS_OF_FUNCTIONS = frozenset({"sum", "mean", "psum", "pmean", "pmax", "pmin", "psum_scatter"})
_NUMERIC_MODULES = frozenset({"jnp", "np", "lax", "jax"})


@dataclasses.dataclass(frozen=True)
class Fault:
    """A replacement of some characters of a file.

    Attributes:
        path: The file, relative to the root of the repository.
        line: From 1.
        start: Offset of the first replaced character in the file.
        old: The replaced characters.
        new: The characters that replace them.
    """

    path: str
    kind: str
    line: int
    start: int
    old: str
    new: str

    def plant(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: The text isn't the one for which the fault was drawn.
        """
        end = self.start + len(self.old)
        if text[self.start : end] != self.old:
            raise ValueError(
                f"{self.path}: expected {self.old!r} at character {self.start}, found {text[self.start : end]!r}; "
                "these faults were drawn for another version of the file"
            )
        return text[: self.start] + self.new + text[end:]

    @property
    def described(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


def candidates(path: str, text: str) -> list[Fault]:
    """All faults of a file, in the order of their places; none if it doesn't parse."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    offsets = _Offsets(text)
    results = [
        Fault(path, kind, node.lineno, start, text[start:end], new)
        for node in _numeric_nodes(tree)
        for kind, rule in _RULES.items()
        for start, end, new in rule(node, offsets)
    ]
    differing = dict.fromkeys(fault for fault in results if fault.old != fault.new)
    return sorted(differing, key=lambda fault: (fault.start, fault.kind))


def draw(sources: dict[str, str], count: int, seed: int) -> list[Fault]:
    """Draw `count` faults from the candidates of some files: the kinds in turn, so that each has its share.

    The same sources, count and seed give the same faults.
    """
    generator = random.Random(seed)
    of_kind: dict[str, list[Fault]] = {kind: [] for kind in KINDS}
    for path in sorted(sources):
        for fault in candidates(path, sources[path]):
            of_kind[fault.kind].append(fault)
    for faults in of_kind.values():
        generator.shuffle(faults)
    drawn: list[Fault] = []
    while len(drawn) < count and any(of_kind.values()):
        for faults in of_kind.values():
            while faults and len(drawn) < count:
                fault = faults.pop()
                if _parses(fault.plant(sources[fault.path])):
                    drawn.append(fault)
                    break
    return drawn


class _Offsets:
    """Character offsets of a text's nodes, which `ast` gives as lines and bytes."""

    def __init__(self, text: str):
        self.text = text
        self._lines = [f"{line}\n" for line in text.split("\n")]
        self._begin = [0]
        for line in self._lines:
            self._begin.append(self._begin[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        return self._at(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _at(self, line: int, byte: int) -> int:
        return self._begin[line - 1] + len(self._lines[line - 1].encode()[:byte].decode())


Replacement = tuple[int, int, str]


def _symbol_between(left: ast.AST, right: ast.AST, symbol: str, new: str, offsets: _Offsets) -> Iterator[Replacement]:
    """The operator between two operands; none if brackets or comments make it ambiguous."""
    begin, end = offsets.end(left), offsets.start(right)
    between = offsets.text[begin:end]
    if between.strip(" ()\n\t") == symbol:
        at = begin + between.index(symbol)
        yield at, at + len(symbol), new


def _sign(node: ast.AST, offsets: _Offsets) -> Iterator[Replacement]:
    """`a + b` to `a - b` and back, and `-a` to `+a`."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        yield from _symbol_between(node.left, node.right, _SYMBOLS[type(node.op)], _SIGNS[type(node.op)], offsets)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        start = offsets.start(node)
        yield start, start + 1, "+"


def _axis(node: ast.AST, offsets: _Offsets) -> Iterator[Replacement]:
    """An integer axis to its neighbor: `axis=0` to `axis=1`, another to `axis=0`."""
    if not isinstance(node, ast.Call):
        return
    places = [keyword.value for keyword in node.keywords if keyword.arg in _AXIS_KEYWORDS]
    if isinstance(node.func, ast.Attribute) and node.func.attr in {*_REDUCTIONS_OF_METHODS, "cumsum", "argmax", "max"}:
        module = isinstance(node.func.value, ast.Name) and node.func.value.id in _NUMERIC_MODULES
        places += node.args[module : module + 1]
    for place in places:
        value = _integer(place)
        if value is not None:
            yield offsets.start(place), offsets.end(place), "1" if value == 0 else "0"


def _off_by_one(node: ast.AST, offsets: _Offsets) -> Iterator[Replacement]:
    """`<` to `<=`, `>` to `>=` and back, and the integer of `a + 1` or `range(1, n)` to the next one."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        operator = type(node.ops[0])
        yield from _symbol_between(node.left, node.comparators[0], _SYMBOLS[operator], _COMPARISONS[operator], offsets)
    places: Sequence[ast.AST] = ()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        places = (node.left, node.right)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        places = node.args
    elif isinstance(node, ast.Slice):
        places = [bound for bound in (node.lower, node.upper) if bound is not None]
    for place in places:
        value = _integer(place)
        if value is not None and 0 <= value <= 8:
            yield offsets.start(place), offsets.end(place), str(value + 1)


def _reduction(node: ast.AST, offsets: _Offsets) -> Iterator[Replacement]:
    """A sum or a mean, over an array or over devices, to what it reduces."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    owner, start, end = node.func.value, offsets.start(node), offsets.end(node)
    root = owner
    while isinstance(root, ast.Attribute):
        root = root.value
    if isinstance(root, ast.Name) and root.id in _NUMERIC_MODULES:
        if node.func.attr in _REDUCTIONS_OF_FUNCTIONS and node.args and not isinstance(node.args[0], ast.Starred):
            first = offsets.text[offsets.start(node.args[0]) : offsets.end(node.args[0])]
            yield start, end, f"({first})"
    elif node.func.attr in _REDUCTIONS_OF_METHODS:
        # `x.sum(axis=0)`, or `shard.sum(x, dims)`, in which the first argument is reduced.
        reduced = node.args[0] if node.args and isinstance(node.args[0], ast.Name | ast.Call | ast.BinOp) else owner
        yield start, end, f"({offsets.text[offsets.start(reduced) : offsets.end(reduced)]})"


_RULES: dict[str, Callable[[ast.AST, _Offsets], Iterator[Replacement]]] = {
    "sign": _sign, "axis": _axis, "off_by_one": _off_by_one, "reduction": _reduction,
}  # fmt: skip


def _integer(node: ast.AST) -> int | None:
    """The value of an integer literal."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _integer(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _numeric_nodes(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that a run evaluates for their values."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, _SKIPPED) or _only_raises(node) or _is_warning(node):
                continue
            if isinstance(node, ast.expr):
                if _joins_text(node):
                    continue
                yield node
            yield from _numeric_nodes(node)


_SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.arg)


def _only_raises(node: ast.AST) -> bool:
    """A condition that only raises an error: other tests than those of values look at it."""
    return isinstance(node, ast.If) and not node.orelse and all(isinstance(inner, ast.Raise) for inner in node.body)


def _is_warning(node: ast.AST) -> bool:
    """A call that only prints or warns."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    name = ast.unparse(node.value.func)
    return name in ("print", "warnings.warn") or name.rpartition(".")[2] in ("debug", "info", "warning", "say")


def _joins_text(node: ast.expr) -> bool:
    """An addition of texts or tuples, of which another sign is an error at once."""
    if not isinstance(node, ast.BinOp):
        return False
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
