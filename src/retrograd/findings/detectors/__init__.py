"""The detectors: one fault, or one family, a file."""

from retrograd.findings.detector import Detector
from retrograd.findings.detectors.kinks import Kinks

DETECTORS: tuple[type[Detector], ...] = (Kinks,)
"""All of them, in the order in which they are asked."""
