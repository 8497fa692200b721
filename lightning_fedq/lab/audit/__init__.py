"""Attempts to refute privacy claims: enumeration, simulation on worst neighbours, canaries in one run."""

from lightning_fedq.lab.audit.simulated import audit as audit
from lightning_fedq.lab.audit.views import Finding as Finding
