"""`Sandbox`: Jinja's sandbox with a meter, because a model folder's template is other people's code.

A rendering may take `STEPS` steps and hold texts of `LENGTH` characters. Counted are turns of loops, calls,
filters and operators, and the length of what they make; what could be too long is refused before it is made.
So a hostile template ends after seconds with an error, whatever it loops over or multiplies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS = 10_000_000
LENGTH = 32_000_000  # characters of a text, items of a list
_PER_STEP = 64  # characters or items whose making counts as one step
_WIDTH = 10_000  # of a field that is filled up with blanks
_DIGITS = 4_000  # of a number, in bits
_NODES = 1_000_000  # parts of a nest of lists that is written as a text
_SPEC = re.compile(
    r"\{[^{}]*(?:\d{5,}|\{)|%(?:\([^)]*\))?[^a-zA-Z%]*(?:\d{5,}|\*)"  # {:99999} {:{w}} %99999d %*d
)
# Filters that look at the items of a list; all others write it as a text first, whatever is in it.
_ITEMWISE = frozenset(
    {
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
    }
    | {"map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
    | {"sort", "unique"}
)
# Filters and methods that fill up to a width.
_FILLED = frozenset(
    {"center", "ljust", "rjust", "zfill", "to_bytes", "expandtabs", "indent", "tojson", "batch", "slice"}
)
_left: ContextVar[list[int]] = ContextVar("steps that are left")
_OF_DICTS = frozenset(dir(dict))


@contextmanager
def metered() -> Iterator[None]:
    """What a `Sandbox`'s templates do inside shares one budget."""
    token = _left.set([STEPS])
    try:
        yield
    finally:
        _left.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """Options as of Jinja's environments. Templates render only inside `metered`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_written)
        self.filters = {name: _checked(name, function) for name, function in self.filters.items()}
        self.globals.pop("lipsum", None)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _checked(name, function)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", getattr(getattr(__obj, "__wrapped__", None), "__self__", None))
        if owner is __self and __obj in (__self.turn, __self.concat):  # they count for themselves
            return __obj(*args)
        if isinstance(owner, str | bytes | int | float):
            _grow(getattr(__obj, "__name__", ""), owner, args, kwargs)
        return _made(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        # As Jinja's, but a message's field is no attribute that is looked for first, and missed.
        if type(obj) is dict and attribute not in _OF_DICTS:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _room(_product(operator, left, right))
        return _made(super().call_binop(context, operator, left, right))

    def turn(self, size: int) -> str:
        """Before a body of `size` characters of template text is written."""
        spend(1 + size // _PER_STEP)
        return ""

    # Jinja's own name: of what macros and blocks have written, too.
    def concat(self, values: Iterable[Any]) -> str:
        return str(_made("".join([str(_written(v)) for v in values])))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metered().visit(super()._parse(source, name, filename))
        return tree


def spend(steps: int) -> None:
    """TemplateError when the rendering's budget is used up."""
    left = _left.get()
    left[0] -= steps
    if left[0] < 0:
        raise TemplateError(f"it takes more than {STEPS:,} steps")


class _Metered(NodeTransformer):
    # Bodies that can run many times begin with a call of `turn`; a ~ b becomes a call of `concat`.

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._begin(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._begin(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._begin(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat", nodes.List(node.nodes, lineno=node.lineno), node.lineno)

    def _begin(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = _call("turn", nodes.Const(size, lineno=node.lineno), node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _call(method: str, argument: nodes.Expr, line: int) -> nodes.Call:
    return nodes.Call(
        nodes.EnvironmentAttribute(method, lineno=line), [argument], [], None, None, lineno=line
    )


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    own = 1 if hasattr(function, "jinja_pass_arg") else 0  # what Jinja puts before the value

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _grow(name, args[own] if len(args) > own else None, args[own + 1 :], kwargs)
        return _made(function(*args, **kwargs))

    return run


def _grow(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a filter or method whose result would be too long, as far as its arguments tell."""
    given = [*args, *kwargs.values()]
    numbers = [a for a in given if isinstance(a, int)]
    texts = [a for a in given if isinstance(a, str)]
    if name not in _ITEMWISE:
        _room(_weight(value))
    if name in _FILLED:
        widest = max([0, *numbers, *map(len, texts)])
        lines = str(value).count("\n") + str(value).count("\t") + 1 if isinstance(value, str) else 1
        _room(widest * lines)
        if name in ("tojson", "to_bytes") and widest > _WIDTH:
            _room(widest * LENGTH)
    elif name in ("format", "format_map"):
        _check_format(str(value), given)
    elif name == "translate":
        longest = max([0, *(len(str(v)) for a in given if isinstance(a, dict) for v in a.values())])
        _room(len(value) * longest)
    elif name == "replace" and len(texts) > 1:
        _room(len(str(value)) + str(value).count(texts[0]) * len(texts[1]))
    elif name == "wordwrap":
        _room(len(str(value)) * max([1, *map(len, texts)]))
    elif name == "join":
        items = given[0] if isinstance(value, str) and given else value
        between = len(value) if isinstance(value, str) else max([0, *map(len, texts)])
        _room(_weight(items) + _size(items) * between)


def _product(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return LENGTH + 1 if bits > _DIGITS else 0
    if operator == "*":
        times = left if isinstance(left, int) else right if isinstance(right, int) else 0
        return times * max(_size(left), _size(right))
    if operator == "%" and isinstance(left, str):
        _check_format(left, [right])
    return _size(left) + _size(right)


def _check_format(form: str, given: list[Any]) -> None:
    if _SPEC.search(form):
        raise TemplateError("it formats with a width that is too large or not written down")
    _room(sum(_weight(a) for a in given) * max(1, form.count("{") + form.count("%")))


def _written(value: Any) -> Any:
    # Of every expression that is written out.
    if type(value) is str:
        return _made(value)
    _room(_weight(value))
    return _made(value)


def _made(value: Any) -> Any:
    size = _size(value)
    _room(size)
    spend(1 + size // _PER_STEP)
    return value


def _room(size: int) -> None:
    if size > LENGTH:
        raise TemplateError(f"it makes a text or list longer than {LENGTH:,}")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _weight(value: Any) -> int:
    """Characters and items of a value and all in it: a small nest of lists can be a text without end."""
    if not isinstance(value, list | tuple | dict):
        return _size(value)
    stack, total, seen = [value], 0, 0
    while stack:
        part = stack.pop()
        seen += 1
        if seen + len(stack) > _NODES:
            return LENGTH + 1
        if isinstance(part, dict):
            stack += part.keys()
            stack += part.values()
        elif isinstance(part, list | tuple):
            stack += part
        else:
            total += _size(part)
    spend(seen)
    return total + seen
