"""JSON as its standard has it: what ``json`` lets pass beyond that is refused."""

import json
import re
from typing import Any

from sim.errors import SpecError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def strict_json(text: bytes) -> Any:
    """``text`` parsed; SpecError for a key given twice, NaN, infinity or half of a surrogate pair."""
    try:
        content = _DECODER.decode(text.decode())
        if b"\\u" in text and _SURROGATE.search(text):
            # Such a text can be held in memory and written to no file.
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise SpecError(f"not valid JSON: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise SpecError("not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise SpecError(f"not valid JSON: {error}") from None
    return content


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in record if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} appears twice")
    return record


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number JSON has")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large for a number")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite
)
