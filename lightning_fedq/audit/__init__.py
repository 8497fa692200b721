"""Audits that try to refute privacy claims: enumeration, simulation, and canaries in one run."""

from lightning_fedq.audit.audit_case import AuditCase as AuditCase
from lightning_fedq.audit.cases import audit_cases as audit_cases
from lightning_fedq.audit.simulated import audit as audit
from lightning_fedq.audit.views import Finding as Finding
