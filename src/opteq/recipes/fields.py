"""Frozen dataclasses to JSON and back, field by field: nothing is imported or run, and every error names the place."""

import difflib
import reprlib
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

__all__ = ["RecipeError", "decode", "encode"]

T = TypeVar("T")
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): "null"}


class RecipeError(ValueError):
    """A configuration that says something which is no setting: one line with the dotted path."""


def encode(value: Any) -> Any:
    """JSON of a dataclass: the same fields, tuples as lists."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    return [encode(item) for item in value] if isinstance(value, (tuple, list)) else value


def decode(kind: type[T], value: Any, path: str) -> T:
    """The dataclass of which `encode` gave the value. Every field must be there, of its type, and no other."""
    if not isinstance(value, Mapping):
        known, got = ", ".join(_names(kind)), reprlib.repr(value)
        raise RecipeError(f"{path or 'the configuration'} must be an object with the fields {known}. Got {got}.")
    check_names(value, _names(kind), path)
    hints = get_type_hints(kind)
    given = {name: _value(hints[name], value[name], _join(path, name)) for name in _names(kind)}
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{path}: {error}") from error


def check_names(given: Iterable[str], known: Iterable[str], path: str) -> None:
    """Raise unless exactly the known names are given."""
    given, known = list(given), list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
            shown = name if name.isidentifier() and len(name) < 50 else reprlib.repr(name)
            raise RecipeError(f"{_join(path, shown)} is no setting: {hint}")
    for name in known:
        if name not in given:
            raise RecipeError(f"{_join(path, name)} is missing.")


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(cast(Any, kind))]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _value(kind: Any, value: Any, path: str) -> Any:
    """The value as a type that fields have: a number, a text, a choice, null, a list of these, or one of several of them."""
    if is_dataclass(kind):
        return decode(cast(type, kind), value, path)
    for choice in _choices(kind):
        found = _match(choice, value)
        if found is not _NO:
            return found
    raise RecipeError(f"{path} must be {' or '.join(map(_word, _choices(kind)))}. Got {reprlib.repr(value)} instead.")


_NO = object()


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _match(kind: Any, value: Any) -> Any:
    """The value as this one type, or _NO."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else _NO
    if get_origin(kind) is tuple:
        return _match_tuple(get_args(kind), value)
    if kind is float and type(value) is int:
        return float(value) if abs(value) <= sys.float_info.max else _NO
    return value if type(value) is kind else _NO


def _match_tuple(kinds: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list):
        return _NO
    kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
    if len(kinds) != len(value):
        return _NO
    found = tuple(_match(kind, item) for kind, item in zip(kinds, value, strict=True))
    return _NO if _NO in found else found


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return f"a list of {'' if kinds[-1] is ... else f'{len(kinds)} '}{_WORDS[kinds[0]].split()[-1]}s"
    return _WORDS[kind]
