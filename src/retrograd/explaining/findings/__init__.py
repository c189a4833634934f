"""Findings: what is wrong with a run, where, since when, why, and what to do.

These names, for detectors of your own, are ``rg.findings``.
"""

from retrograd.core.runs.findings import Evidence as Evidence
from retrograd.core.runs.findings import Finding as Finding
from retrograd.core.runs.findings import Findings as Findings
from retrograd.core.runs.findings import NotChecked as NotChecked
from retrograd.explaining.findings.detector import Detector as Detector
from retrograd.explaining.findings.detector import Words as Words
from retrograd.explaining.findings.record import CannotTell as CannotTell
from retrograd.explaining.findings.record import Record as Record
