"""Certificates: conditions at initialisation that imply linear convergence of gradient descent, and their verification."""

from opteq.theory.certificates.conditions import Certificate, Condition, Guarantee
from opteq.theory.certificates.decide import certify
from opteq.theory.certificates.initial import certified_init
from opteq.theory.certificates.measure import Measurement, measure
from opteq.theory.certificates.monitor import Monitor, Record
from opteq.theory.certificates.run import Run, Violation, check, descend, measure_flow

__all__ = [
    "Certificate",
    "Condition",
    "Guarantee",
    "Measurement",
    "Monitor",
    "Record",
    "Run",
    "Violation",
    "certified_init",
    "certify",
    "check",
    "descend",
    "measure",
    "measure_flow",
]
