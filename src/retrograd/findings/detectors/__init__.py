"""The detectors: one fault, or one family, a file."""

from retrograd.findings.detector import Detector

DETECTORS: tuple[type[Detector], ...] = ()
"""All of them, in the order in which they are asked."""
