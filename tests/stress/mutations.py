"""Files gone wrong: bytes that are changed, lost or added at random, and JSON whose values are."""

import json
import random
from typing import Any

VALUES = [
    *(None, True, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "nan", "../../etc/passwd", "\x00", "\ud800", "<script>", "x" * 5000, [], {}, [[]], {"__float__": "inf"}, {"": None}),
]


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content after one to four random changes; now and then something else altogether."""
    if draw.random() < 0.03:
        return draw.choice([b"", b"\0", b"{}", draw.randbytes(draw.randrange(1, 200)), b"\xff" * 64, content * 2])
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        _change(data, draw)
    return bytes(data)


def _change(data: bytearray, draw: random.Random) -> None:
    # Headers decide most, so that half of the changes are near the beginning.
    at = draw.randrange(max(1, min(len(data), 64) if draw.random() < 0.5 else len(data)))
    match draw.choice(["bit", "byte", "number", "cut", "delete", "insert", "repeat", "zero"]):
        case "bit" if data:
            data[at] ^= 1 << draw.randrange(8)
        case "byte" if data:
            data[at] = draw.randrange(256)
        case "number":  # sizes and counts
            order = draw.choice(["little", "big"])
            data[at : at + 4] = draw.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, draw.getrandbits(32)]).to_bytes(4, order)
        case "cut":
            del data[at:]
        case "delete":
            del data[at : at + draw.randrange(1, 40)]
        case "insert":
            data[at:at] = draw.randbytes(draw.randrange(1, 40))
        case "repeat":
            data[at:at] = data[at : at + draw.randrange(1, 200)]
        case "zero":
            data[at : at + 16] = bytes(len(data[at : at + 16]))


def mutated_json(value: Any, draw: random.Random) -> Any:
    """The JSON value with one to three places changed: another value, a field more or less, or nested deeper."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice([1, 1, 2, 3])):
        place = draw.choice(list(_places(value))) if isinstance(value, dict | list) and value else None
        if place is None:
            return draw.choice(VALUES)
        holder, key = place
        match draw.choice(["value", "value", "value", "drop", "add", "nest"]):
            case "value":
                holder[key] = draw.choice(VALUES)
            case "drop":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[draw.choice(["", "kind", "x", "__class__", "lr"])] = draw.choice(VALUES)
            case _:
                holder[key] = [holder[key]]
    return value


def _places(value: Any) -> Any:
    """Every (container, key) inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(items):
        yield value, key
        if isinstance(part, dict | list):
            yield from _places(part)


def json_bytes(value: Any) -> bytes:
    """As text; with NaN, infinity and lone surrogates, as nobody should write them."""
    return json.dumps(value).encode()
