"""Conversion of plain fields, which the parties exchange, to Flower's records and back.

All fields travel in one `ConfigRecord`, because Flower sends each object of a message in a separate request
of a kilobyte. Long bytes, such as the weights of a large model, are one-dimensional `Array`s with a
serialisation type of this library. Flower sends arrays in chunks, and no other reader takes these bytes for
numbers.
"""

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

_SMALL, _LARGE, _KIND = "fedq", "fedq.bytes", "fedq/1"
_LONG = 1 << 20

Fields = dict[str, Any]
"""Bytes, text, numbers and lists of numbers, by name."""


def to_record(fields: Fields) -> RecordDict:
    """Return the fields as the content of a Flower message."""
    pairs = fields.items()
    large = {name: value for name, value in pairs if isinstance(value, bytes) and len(value) > _LONG}
    arrays = {name: Array("uint8", (len(value),), _KIND, value) for name, value in large.items()}
    small = {name: value for name, value in fields.items() if name not in large}
    return RecordDict({_SMALL: ConfigRecord(small)} | ({_LARGE: ArrayRecord(arrays)} if arrays else {}))


def from_record(record: RecordDict) -> Fields:
    """Return the fields of a record that `to_record` made.

    Raises:
        ValueError: If the record is not one of this library.
    """
    if _SMALL not in record.config_records or not {_SMALL, _LARGE}.issuperset(record):
        raise ValueError(f"Not a message of lightning_fedq: {sorted(record)}")
    large = record.array_records.get(_LARGE, {})
    return {**record.config_records[_SMALL], **{name: array.data for name, array in large.items()}}


def bytes_in(fields: Fields, name: str) -> bytes:
    """Return the bytes in a field from another party, or b"" if it has no bytes.

    `bytes(number)` would make as many zeros, so the type is checked.
    """
    value = fields.get(name)
    return value if isinstance(value, bytes) else b""


def number_in(fields: Fields, name: str) -> int | None:
    """Return the integer in a field from another party, or None if it has no integer."""
    value = fields.get(name)
    return value if type(value) is int else None


def check_kinds(fields: Fields, wanted: Mapping[str, type], optional: Mapping[str, type]) -> None:
    """Refuse fields that are missing or of another type. A list must hold integers.

    Args:
        fields: Fields of a message by name.
        wanted: Type of each field that must be there, by name.
        optional: Type of each field that may be there, by name.

    Raises:
        ValueError: If a field is missing or has another type.
    """
    present = {name: kind for name, kind in optional.items() if name in fields}
    for name, kind in {**wanted, **present}.items():
        value = fields.get(name)
        if type(value) is not kind or (kind is list and any(type(part) is not int for part in fields[name])):
            words = "list of integers" if kind is list else kind.__name__
            actual = type(value).__name__ if name in fields else "nothing"
            raise ValueError(
                f"Field {name!r} must be {words}, got {actual}. Both sides need the same version."
            )
