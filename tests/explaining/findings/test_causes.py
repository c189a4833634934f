import pytest

from retrograd.core.runs.findings import SEVERITIES, Finding, Severity
from retrograd.explaining.findings.detector import Detector
from retrograd.explaining.findings.detectors import DETECTORS
from retrograd.explaining.findings.explain import rank_findings

EXPLAINS = {"cause": ("symptom",), "symptom": ("cause",)}


def made(detector: str, severity: Severity, step: int | None = 0) -> Finding:
    return Finding(detector=detector, severity=severity, message=f"{detector}.", step=step)


def test_a_symptom_stands_under_its_cause() -> None:
    [said] = rank_findings([made("symptom", "note", 9), made("cause", "warning")], EXPLAINS)
    assert said.detector == "cause"
    assert [each.detector for each in said.causes] == ["symptom"]


def test_a_note_does_not_hide_an_alarm() -> None:
    said = rank_findings([made("symptom", "warning", 9), made("cause", "note")], EXPLAINS)
    assert [(each.detector, each.causes) for each in said] == [("symptom", ()), ("cause", ())]


def test_what_began_before_is_no_symptom() -> None:
    said = rank_findings([made("symptom", "warning", 1), made("cause", "warning", 5)], {"cause": ("symptom",)})
    assert [each.detector for each in said] == ["symptom", "cause"]


def test_a_heading_is_as_severe_as_what_it_explains() -> None:
    """A run that is lost, and its cause: the cause is critical, and stands in front of what is not."""
    found = [made("symptom", "critical", 9), made("beside", "critical", 20), made("cause", "warning", 5)]
    said = rank_findings(found, {"cause": ("symptom",)})
    assert [(each.detector, each.severity) for each in said] == [("cause", "critical"), ("beside", "critical")]
    assert [(each.detector, each.severity) for each in said[0].causes] == [("symptom", "critical")]


def test_what_a_symptom_explains_is_not_lost() -> None:
    """A chain: the middle one has taken the last under itself before the first takes it."""
    found = [made("last", "critical", 9), made("middle", "warning", 5), made("first", "warning", 1)]
    [said] = rank_findings(found, {"first": ("middle",), "middle": ("last",)})
    assert (said.detector, said.severity) == ("first", "critical")
    assert {each.detector for each in said.causes} == {"middle", "last"}


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda each: each.slug)
def test_no_detector_hides_what_is_graver(detector: Detector) -> None:
    """Whatever a heading explains, the gravest severity of all is that of a heading."""
    for slug in {each.slug for each in DETECTORS} - {detector.slug}:
        for severity in SEVERITIES:
            found = [made(detector.slug, severity), made(slug, "critical")]
            said = rank_findings(found, {each.slug: each.explains for each in DETECTORS})
            assert said[0].severity == "critical"
            assert {each.detector for finding in said for each in (finding, *finding.causes)} == {detector.slug, slug}


@pytest.mark.parametrize("slug", ["nan-input", "nan-forward", "nan-backward", "nan-update"])
def test_a_jump_of_the_loss_is_a_symptom_of_numbers_that_are_not_finite(slug: str) -> None:
    explains = {each.slug: each.explains for each in DETECTORS}
    [said] = rank_findings([made("loss-spike", "warning", 40), made(slug, "critical", 40)], explains)
    assert said.detector == slug


def test_ranks_that_ddp_has_not_averaged_are_no_fault_of_their_own() -> None:
    explains = {each.slug: each.explains for each in DETECTORS}
    found = [made("ranks-disagree", "critical", 0), made("unused-in-ddp", "critical", 0)]
    [said] = rank_findings(found, explains)
    assert (said.detector, [each.detector for each in said.causes]) == ("unused-in-ddp", ["ranks-disagree"])
    found[1] = made("unused-in-ddp", "critical", 1)  # they differed before
    assert len(rank_findings(found, explains)) == 2
