"""Findings: what is wrong with a run, where, since when, why, and what to do.

These names, for detectors of your own, are ``rg.findings``.
"""

from retrograd.findings.detector import Detector as Detector
from retrograd.findings.detector import Words as Words
from retrograd.findings.finding import Evidence as Evidence
from retrograd.findings.finding import Finding as Finding
from retrograd.findings.finding import Findings as Findings
from retrograd.findings.finding import NotChecked as NotChecked
from retrograd.findings.record import CannotTell as CannotTell
from retrograd.findings.record import Record as Record
