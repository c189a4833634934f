"""The report: one HTML file that opens offline."""

from retrograd.core.views.report.report import write_report as write_report
