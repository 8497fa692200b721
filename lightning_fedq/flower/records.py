"""Plain fields, as the parties exchange them, to Flower's records and back: bytes stay bytes.

All travels in one `ConfigRecord`, because Flower sends every object of a message by a request of its own, a
kilobyte each. Bytes that are long, such as the weights of a large model, are one-dimensional `Array`s of a
serialisation of their own: Flower sends them in chunks, and nobody takes them for numbers.
"""

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

_SMALL, _LARGE, _KIND = "fedq", "fedq.bytes", "fedq/1"
_LONG = 1 << 20

Fields = dict[str, Any]
"""Bytes, text, numbers and lists of numbers by name."""


def to_record(fields: Fields) -> RecordDict:
    """Fields as the content of a Flower message."""
    large = {name: value for name, value in fields.items() if _is_long(value)}
    arrays = {name: Array("uint8", (len(value),), _KIND, value) for name, value in large.items()}
    small = {name: value for name, value in fields.items() if name not in large}
    return RecordDict({_SMALL: ConfigRecord(small)} | ({_LARGE: ArrayRecord(arrays)} if arrays else {}))


def from_record(record: RecordDict) -> Fields:
    """Read `to_record`.

    Raises:
        ValueError: If it is something else's content.
    """
    if _SMALL not in record.config_records or not {_SMALL, _LARGE}.issuperset(record):
        raise ValueError(f"no message of lightning_fedq: {sorted(record)}")
    small, large = record.config_records[_SMALL], record.array_records.get(_LARGE, {})
    found = {**small, **{name: array.data for name, array in large.items()}}
    as_written = len(found) == len(small) + len(large) and not any(map(_is_long, small.values()))
    for array in large.values():
        told = (array.dtype, tuple(array.shape), array.stype)
        as_written &= told == ("uint8", (len(array.data),), _KIND) and _is_long(array.data)
    if not as_written:
        raise ValueError("arrays where bytes were expected; is the other side of the same version?")
    return found


def _is_long(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) > _LONG


def bytes_in(fields: Fields, name: str) -> bytes:
    """Bytes of a field that somebody else wrote, or b"". A number there does not mean so many zeros."""
    found = fields.get(name)
    return found if isinstance(found, bytes) else b""


def number_in(fields: Fields, name: str) -> int | None:
    """Integer in a field that somebody else wrote, or None."""
    found = fields.get(name)
    return found if type(found) is int else None


def check_kinds(fields: Fields, wanted: Mapping[str, type], optional: Mapping[str, type]) -> None:
    """Refuse fields that are missing or of another kind, by name. A list holds integers.

    Raises:
        ValueError: If one is.
    """
    present = {name: kind for name, kind in optional.items() if name in fields}
    for name, kind in {**wanted, **present}.items():
        found = fields.get(name)
        if type(found) is not kind or (kind is list and any(type(part) is not int for part in fields[name])):
            words = "list of integers" if kind is list else kind.__name__
            came = type(found).__name__ if name in fields else "nothing"
            raise ValueError(
                f"the field {name!r} must be {words}, {came} came; is the server of the same version?"
            )
