"""TOML files to Config and back: strict about keys, types and values.

An unknown key is an error that names the nearest valid one; `--set section.key=value` goes through
the same checks. `to_toml` writes the resolved config that is saved with a run and read on resume.
"""

import dataclasses
import difflib
import json
import types
import typing
from pathlib import Path
from typing import Any

import tomli

from llmq_nb.config import Config
from llmq_nb.core.errors import UserError
from llmq_nb.core.sizes import parse_bytes

LEAST_LIMIT = 1 << 20
"""Least memory limit that is believed [bytes]: "15" without a unit is a mistake."""


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """The Config of a TOML file, with `section.key=value` overrides.

    A value is TOML; where the key takes text and it is none (a bare word, a number), it is text.

    Raises UserError: no such file, not TOML, unknown or mistyped key, value out of range.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors may leave a mark
    except FileNotFoundError:
        raise UserError(f"no such file: {path}", mend="give the path of a config.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}", mend=str(error)) from None
    return parse_config(text, where=str(path), overrides=overrides)


def parse_config(text: str, *, where: str, overrides: typing.Sequence[str] = ()) -> Config:
    """The Config of TOML text; `where` names it in errors."""
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise UserError("not valid TOML", where=where, mend=str(error)) from None
    for override in overrides:
        _apply(tables, override)
    config = _build(Config, tables, where, "")
    for key in ("device_limit", "host_limit"):
        _check_limit(getattr(config.memory, key), f"{where} memory.{key}")
    return config


def _check_limit(size: str | None, place: str) -> None:
    """A memory limit is a size; config.py is a leaf that cannot read one."""
    if size is not None and parse_bytes(size, where=place) < LEAST_LIMIT:
        raise UserError(f"{size!r}", where=place, mend='at least 1MiB, for example "15GiB"')


def _apply(tables: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    section, dot, key = (part.strip() for part in name.partition("."))
    if not separator or not dot or not key:
        raise UserError(f"--set {override}", mend="write --set section.key=value")
    text = text.strip()
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        parsed = {}
    value = parsed["value"] if len(parsed) == 1 else text
    place, sections = f"--set {override}", typing.get_type_hints(Config)
    if section not in sections:
        mend = _nearest(section, sections, "")
        raise UserError(f"unknown section {section!r}", where=place, mend=mend)
    hint = _hint(section, key)
    if hint is None:
        mend = _nearest(key, typing.get_type_hints(sections[section]), section)
        raise UserError(f"unknown key {key!r}", where=place, mend=mend)
    if not _fits(value, hint) and _fits(text, hint):
        value = text
    _value(value, hint, place)
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise UserError(f"{section} is no section", where=f"--set {override}")
    table[key] = value


def _hint(section: str, key: str) -> Any:
    """The type of a key; None: there is no such key."""
    part = typing.get_type_hints(Config).get(section)
    return None if part is None else typing.get_type_hints(part).get(key)


def _nearest(key: str, names: typing.Iterable[str], section: str) -> str:
    """What an unknown key was meant to be: near in spelling, short for it, or elsewhere."""
    names = list(names)
    near = difflib.get_close_matches(key, names, n=1)
    near += [name for name in names if key == "".join(word[0] for word in name.split("_"))]
    near += [
        f"[{part}] {key}"
        for part in typing.get_type_hints(Config)
        if part != section and _hint(part, key) is not None
    ]
    return f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(names)}"


def _build(cls: Any, table: Any, where: str, section: str) -> Any:
    place = f"{where} [{section}]" if section else where
    if not isinstance(table, dict):
        raise UserError(
            f"{section} = {table!r}", where=where, mend=f"{section} is a section: [{section}]"
        )
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in table:
        if key not in fields:
            kind = "key" if section else "section"
            mend = _nearest(key, fields, section)
            raise UserError(f"unknown {kind} {key!r}", where=place, mend=mend)
    values = {}
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING
        if dataclasses.is_dataclass(hints[name]):
            if name in table or required:
                values[name] = _build(hints[name], table.get(name, {}), where, name)
        elif name in table:
            values[name] = _value(table[name], hints[name], f"{place} {name}")
        elif required:
            raise UserError(f"{name!r} is missing", where=place, mend=f"set {section}.{name}")
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(error.what, where=f"{where} {error.where}", mend=error.mend) from None


def _value(value: Any, hint: Any, place: str) -> Any:
    """`value` as the hinted type: exact, but for int to float and list to tuple."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            if _fits(value, option):
                return _value(value, option, place)
    elif _fits(value, hint):
        if origin is tuple:
            return tuple(_value(item, args[0], place) for item in value)
        return float(value) if hint is float else value
    wanted = _describe(hint)
    choices = [str(a) for a in _choices(hint)]
    items = value if isinstance(value, list) else [value]
    wrong = [str(item) for item in items if str(item) not in choices]
    # 0.7: not `cpu` for `gpu`
    near = difflib.get_close_matches(wrong[0], choices, n=1, cutoff=0.7) if wrong else []
    hint_text = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"{json.dumps(value, default=str)}", where=place, mend=f"must be {wanted}{hint_text}"
    )


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in args)
    if origin is typing.Literal:
        return any(value == a and type(value) is type(a) for a in args)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(v, args[0]) for v in value)
    if hint is float:
        # TOML integers have no bound here, floats have
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023
        return isinstance(value, float) or whole
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _choices(hint: Any) -> list[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return list(args)
    return [choice for arg in args for choice in _choices(arg)]


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in args if a is not type(None))
    if origin is typing.Literal:
        return " | ".join(repr(a) for a in args)
    if origin is tuple:
        plain = {int: "whole numbers, [1, 2]", str: 'strings, ["a", "b"]'}
        return f"a list of {plain.get(args[0]) or _describe(args[0])}"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[hint]


def to_toml(config: Config) -> str:
    """The whole config as TOML, every default written out; keys that are None are left out."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value is not None:
                lines.append(f"{field.name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves bare
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):  # NumPy's too: their own repr is no TOML
        return repr(float(value))  # round-trips, and writes inf and nan as TOML does
    return str(int(value))
