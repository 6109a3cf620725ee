"""Settings as TOML, both ways. It must not know which settings there are."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidequest_langchain.errors import ConfigError


def read(source: Path | str) -> dict[str, Any]:
    """The tables of a TOML file, or of TOML text: text is what holds a `=` or a line end.

    Raises:
        ConfigError: The file cannot be read, or is no TOML.
    """
    text = source
    if isinstance(source, Path) or (source and "=" not in source and "\n" not in source):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            msg = f"the settings file {str(source)!r} cannot be read: {error}"
            raise ConfigError(msg) from error
    try:
        return tomllib.loads(str(text))
    except tomllib.TOMLDecodeError as error:
        msg = f"the settings are no valid TOML: {error}"
        raise ConfigError(msg) from error


def write(tables: Mapping[str, Any]) -> str:
    """Tables of plain values as TOML text, nested tables last.

    `None` can only be a limit that is lifted, and TOML has no word for it: it becomes `inf`.

    Raises:
        ConfigError: A value has no TOML form.
    """
    plain = {k: v for k, v in tables.items() if not isinstance(v, Mapping)}
    lines = [f"{name} = {_value(name, value)}" for name, value in plain.items()]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{k} = {_value(k, v)}" for k, v in table.items())]
    return "\n".join(lines).strip() + "\n"


def _value(name: str, value: object) -> str:
    if value is None:
        return "inf"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        # JSON's escapes are TOML's, but for the one character that JSON leaves as it is.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, tuple):
        return "[" + ", ".join(_value(name, item) for item in value) + "]"
    msg = f"{name} is {value!r}, which cannot be written as TOML; give the name of a policy"
    raise ConfigError(msg)
