"""Names that classes of users defined before 0.3.0, and that the library no longer reads."""

from collections.abc import Mapping

MECHANISM_NAMES = {
    "lever": "influence",
    "hands_on": "reuses_noise",
    "alike_clients": "has_exchangeable_clients",
    "noise_of_adder": "has_central_noise",
    "covers_shorter": "price_grows_with_dim",
}
CALLBACK_NAMES = {
    "crosses_clients": "is_shared_by_clients",
    "of_each_client": "is_per_client",
    "lets_out": "unprotected_outputs",
}
REMOVED_NAMES = {
    "audit_cases": "Pass an AuditCase to audit(), or register cases with audit.cases.audit_cases.register.",
    "plan_settings": "`fedq plan` ranks the settings of example().",
}
"""What to use in place of names that mechanisms no longer define."""


def refuse_removed_names(kind: type) -> None:
    """Refuse a mechanism class that defines a name that nobody reads.

    Raises:
        TypeError: If the class has such a name. The message says what to do.
    """
    for name, cure in REMOVED_NAMES.items():
        if hasattr(kind, name):
            raise TypeError(f"{kind.__name__} defines {name}, which nobody reads. {cure}")


def refuse_old_names(owner: object, names: Mapping[str, str]) -> None:
    """Refuse an owner with an old name, because a flag that nobody reads is a privacy fault.

    Args:
        owner: Class or instance.
        names: New names by old names, such as `CALLBACK_NAMES`.

    Raises:
        TypeError: If the owner has an old name. The message has the new one.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    for old, new in names.items():
        if hasattr(owner, old):
            raise TypeError(f"{kind.__name__} defines {old}. Rename it to {new}.")
