"""``retrograd explain --format github`` and ``sarif``, as what reads them would read them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from sarif_pydantic import Sarif
from torch import nn

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.runs.findings import Finding
from retrograd.core.runs.reader import open_run
from retrograd.explaining.findings.detectors import DETECTORS
from retrograd.explaining.launch.explaining import find_place
from retrograd.explaining.views.annotations import format_github, format_sarif
from tests.commands import ENVIRONMENT, run
from tests.explaining.findings.made import MADE

FILE = "we,ird: 100%.py"
CODE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("a%b,c: ::error::\\nd", nn.Linear(4, 4))

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x * float("nan")

model = Net()
with rg.record(model, path):
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a run of a script in it, whose names are hard to write."""
    home = tmp_path_factory.mktemp("home")
    (home / ".git").mkdir()
    (home / "code").mkdir()
    file = home / "code" / FILE
    file.write_text(CODE)
    exec(compile(CODE, str(file), "exec"), {"nn": nn, "rg": rg, "torch": torch, "path": home / "run", "__name__": "x"})
    return home


def explain(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("GITHUB_")} | variables
    code, output, _ = run([sys.executable, "-m", "retrograd", "explain", *words], folder, environment)
    return code, output


def read_commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Commands, their properties and messages, as the runner of GitHub Actions reads them (src/Runner.Common)."""
    read = []
    for line in text.splitlines():
        found = re.fullmatch(r"::(\w+)(?: (.*?))?::(.*)", line)
        assert found is not None, line
        name, properties, message = found.groups()
        named = dict(each.split("=", 1) for each in properties.split(","))
        read.append((name, {key: undo(value, "%3A", ":", "%2C", ",") for key, value in named.items()}, undo(message)))
    return read


def undo(text: str, *pairs: str) -> str:
    pairs = ("%0D", "\r", "%0A", "\n", *pairs, "%25", "%")
    for escaped, letter in zip(pairs[::2], pairs[1::2], strict=True):
        text = text.replace(escaped, letter)
    return text


# ---- in a pipe ----


@pytest.mark.parametrize(("folder", "variables"), [("", {}), ("code", {}), ("..", {"GITHUB_WORKSPACE": "home"})])
def test_an_annotation_is_at_its_line(home: Path, folder: str, variables: Mapping[str, str]) -> None:
    variables = {name: str(home) for name in variables}
    code, output = explain(home / folder, str(home / "run"), "--format", "github", "--fail-on", "critical", **variables)
    assert code == 1
    commands = read_commands(output)
    findings = list(rg.explain(home / "run"))
    assert [name for name, _, _ in commands] == [
        {"critical": "error", "warning": "warning", "note": "notice"}[each.severity] for each in findings
    ]
    for (_, properties, message), finding in zip(commands, findings, strict=True):
        assert properties["title"] == f"retrograd: {finding.detector}"
        assert message.startswith(finding.message.partition("\n")[0][:20])
        if finding.line:
            assert properties["file"] == f"code/{FILE}"
            assert f"{home}/code/{FILE}:{properties['line']}" == finding.line
    worst = commands[0]
    line = CODE.splitlines()[int(worst[1]["line"]) - 1]
    assert 'float("nan")' in line
    assert "step 0" in worst[2]
    assert "\nTo do: " in worst[2]


def test_nothing_but_commands_comes_from_names(home: Path) -> None:
    _, output = explain(home, "run", "--format", "github")
    assert len(output.splitlines()) == len(rg.explain(home / "run"))
    assert "::error::" not in "".join(line[2:] for line in output.splitlines() if line.startswith("::notice"))


def test_a_log_is_what_sarif_says(home: Path) -> None:
    code, output = explain(home, "run", "--format", "sarif")
    assert code == 0
    log = json.loads(output)
    check(log)
    [driver] = [each["tool"]["driver"] for each in log["runs"]]
    [results] = [each["results"] for each in log["runs"]]
    findings = list(rg.explain(home / "run"))
    assert [each["ruleId"] for each in results] == [each.detector for each in findings]
    assert [driver["rules"][each["ruleIndex"]]["id"] for each in results] == [each.detector for each in findings]
    assert [Finding.of_dict(each["properties"]) for each in results] == findings
    physical = results[0]["locations"][0]["physicalLocation"]
    assert unquote(physical["artifactLocation"]["uri"]) == f"code/{FILE}"
    assert log["runs"][0]["originalUriBaseIds"] == {"%SRCROOT%": {"uri": f"{home.resolve().as_uri()}/"}}
    assert f"{home}/code/{FILE}:{physical['region']['startLine']}" == findings[0].line


def test_a_program_speaks_on_stderr(home: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch import nn\nmodel = nn.Linear(2, 1)\nprint('mine')\n"
        "for _ in range(2):\n    (model(torch.ones(1, 2)) * float('inf')).sum().backward()\n"
    )
    code, output = explain(tmp_path, "--format", "sarif", "train.py")
    assert code == 0
    log = json.loads(output)
    check(log)
    assert {
        each["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for each in log["runs"][0]["results"]
    } == {"train.py"}


def check(log: Mapping[str, Any], *, is_located: bool = True) -> None:
    """What GitHub asks of a log, and that a library that knows the format has read all of it."""
    read = json.loads(Sarif.model_validate(log).model_dump_json(by_alias=True, exclude_none=True))
    for rule in read["runs"][0]["tool"]["driver"]["rules"]:
        assert rule["id"]
    written = strip(log)
    assert strip(read) == written
    for result in log["runs"][0]["results"]:
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        assert bool(result.get("locations")) >= is_located
        for location in result.get("locations", ()):
            assert ("physicalLocation" in location) >= is_located
            assert location.get("physicalLocation", {"region": {"startLine": 1}})["region"]["startLine"] >= 1


def strip(value: Any) -> Any:
    """Without what is empty, and without properties, which may be anything."""
    if isinstance(value, Mapping):
        return {
            name: strip(each) for name, each in value.items() if each not in ({}, [], None) and name != "properties"
        }
    return [strip(each) for each in value] if isinstance(value, list) else value


# ---- findings of every kind ----


def test_every_finding_that_there_is(tmp_path: Path) -> None:
    log = json.loads(format_sarif(MADE, tmp_path))
    check(log, is_located=False)
    assert len(log["runs"][0]["results"]) == len(read_commands(format_github(MADE, tmp_path))) == len(MADE)
    known = {each.slug for each in DETECTORS}
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert all(("help" in rule) == (rule["id"] in known) for rule in rules)


@pytest.mark.parametrize("line", ["", "train.py", "nowhere.py:3", "In[2]:20", "<string>:1", ":3", "x:y", "/:1"])
def test_a_line_that_is_not_known_has_no_file(tmp_path: Path, line: str) -> None:
    finding = Finding(detector="x", severity="note", message="It is so.", line=line)
    [(_, properties, _)] = read_commands(format_github([finding], tmp_path))
    assert set(properties) == {"title"}
    assert "locations" not in json.loads(format_sarif([finding], tmp_path))["runs"][0]["results"][0]


def test_a_finding_without_a_line_is_at_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with rg.record(nn.Linear(1, 1), tmp_path / "run"):
        pass
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    (tmp_path / "run/manifest.json").write_text(json.dumps({**manifest, "command": ["-m", "x", "train.py", "--a"]}))
    place = find_place(open_run(tmp_path / "run"))
    finding = Finding(detector="x", severity="note", message="It is so.", site="fc:output")
    [result] = json.loads(format_sarif([finding], tmp_path.resolve(), place))["runs"][0]["results"]
    physical = result["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"]["uri"] == "train.py"
    assert result["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": "fc:output"}]


def test_a_file_outside_of_the_repository_is_no_annotation_there(tmp_path: Path) -> None:
    (tmp_path / "other.py").touch()
    (tmp_path / "root").mkdir()
    finding = Finding(detector="x", severity="warning", message="It is so.", line=f"{tmp_path}/other.py:2")
    assert "file=" not in format_github([finding], tmp_path / "root")
    location = json.loads(format_sarif([finding], tmp_path / "root"))["runs"][0]["results"][0]["locations"][0]
    assert location["physicalLocation"]["artifactLocation"] == {"uri": (tmp_path / "other.py").as_uri()}


# ---- what cannot be asked ----


@pytest.mark.parametrize("words", [["--json", "--format", "text"], ["--format", "xml"]])
def test_formats_exclude_one_another(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["explain", *words])
    assert left.value.code == 2
    assert "argument --format" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["github", "sarif"])
def test_a_card_has_no_such_format(home: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(home / "run"), "--card", "--format", form]) == 2
    assert "[cannot-launch]" in capsys.readouterr().err
    assert main(["explain", str(home / "run"), "--card", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"]
