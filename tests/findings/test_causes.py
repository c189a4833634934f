from retrograd.findings.explain import rank_findings
from retrograd.findings.finding import Finding, Severity

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
