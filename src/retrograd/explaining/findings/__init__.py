"""Findings: what is wrong with a run, where, since when, why, and what to do.

These names, for detectors of your own, are ``rg.findings``.
"""

from retrograd.explaining.findings.detector import Detector as Detector
from retrograd.explaining.findings.detector import Words as Words
from retrograd.explaining.findings.finding import Evidence as Evidence
from retrograd.explaining.findings.finding import Finding as Finding
from retrograd.explaining.findings.finding import Findings as Findings
from retrograd.explaining.findings.finding import NotChecked as NotChecked
from retrograd.explaining.findings.record import CannotTell as CannotTell
from retrograd.explaining.findings.record import Record as Record
