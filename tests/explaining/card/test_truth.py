"""What the card, ``ls`` and the header say of unmodified scripts is what the scripts count of themselves, in torch."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import retrograd as rg
from retrograd.core.runs.settings import read_settings
from tests import warm
from tests.commands import ENVIRONMENT

HEAD = """
import copy, json, torch
from torch import nn
from torch.nn.utils import parametrize, parametrizations
from torch.nn import functional as F
torch.manual_seed(0)
begun = []
def begin(*modules):
    begun.extend((each, each.detach().clone()) for module in modules for each in module.parameters())
def tell(**modules):
    moved = {id(each) for each, before in begun if not torch.equal(each, before)}
    print(json.dumps({
        name: [sum(each.numel() for each in module.parameters()),
               sum(each.numel() for each in module.parameters() if id(each) in moved)]
        for name, module in modules.items()
    }))
"""


def record(tmp_path: Path, program: str) -> tuple[rg.Card, dict[str, Any], dict[str, list[int]]]:
    """The card, the settings that ``ls`` shows, and what the program tells: elements of each model, and which moved."""
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(HEAD + program)
    words = [sys.executable, "-m", "retrograd", "run", "-q", "-o", str(folder), str(script)]
    done = warm.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=True)
    assert done.stderr == ""
    run = rg.load(folder)
    return rg.describe(run), read_settings(run.manifest), json.loads(done.stdout)


def count(card: rg.Card) -> dict[str, list[int]]:
    """The same by the card: of each model its elements, and those that were trained."""
    return {
        each.values["model"]: [each.values["count"], each.values.get("trained", {}).get("count", 0)]
        for each in card.of("parameters")
    }


CLASSIFIER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
    def forward(self, x):
        return self.head(self.body(x).relu())
net = Net()
"""

LOOP = """
for step in range(24):
    if step == 13:
        CHANGE
    x = torch.randn(16, 6)
    loss = F.cross_entropy(net(x), torch.randint(3, (16,)))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
tell(self=net)
"""


@pytest.mark.parametrize(
    ("change", "schedule"),
    [
        ("net.head = nn.Linear(8, 3)", "before"),
        ("net.head = nn.Linear(8, 3)", "meanwhile"),
        ("net.head = nn.Linear(8, 3)", "meanwhile, with momentum"),
        ("net.head.weight = nn.Parameter(torch.randn(5, 8))", "meanwhile"),
        pytest.param("net.head.weight = nn.Parameter(torch.randn(5, 8))", "before", marks=pytest.mark.thorough),
        pytest.param("net = Net()", "before", marks=pytest.mark.thorough),
        ("net = Net()", "meanwhile"),
    ],
)
def test_what_an_optimizer_does_not_hold_is_not_trained(tmp_path: Path, change: str, schedule: str) -> None:
    make = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)"
    loop = LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)") if "momentum" in schedule else LOOP
    if schedule == "before":
        program = f"{CLASSIFIER}{make}\n{change}\nbegin(net){loop.replace('CHANGE', 'pass')}"
    else:
        program = f"{CLASSIFIER}{make}\nbegin(net){loop.replace('CHANGE', f'{change}; begin(net)')}"
    card, settings, truth = record(tmp_path, program)
    if change == "net = Net()":
        assert truth["self"][1] == 0
        assert truth["self"] in count(card).values()
        return
    assert count(card) == truth
    assert truth["self"][1] < truth["self"][0]
    assert settings["parameters"] == truth["self"][0]
    assert "in no optimizer" in card.of("parameters")[0].text


def test_what_a_new_optimizer_holds_is_trained(tmp_path: Path) -> None:
    make = "optimizer = torch.optim.Adam(net.parameters(), lr=0.1)"
    change = f"net.head = nn.Linear(8, 3); begin(net.head); {make}"
    card, settings, truth = record(tmp_path, f"{CLASSIFIER}{make}\nbegin(net){LOOP.replace('CHANGE', change)}")
    assert count(card) == truth == {"self": [settings["parameters"]] * 2}


def test_parameters_that_are_put_into_the_groups_by_hand_are_trained(tmp_path: Path) -> None:
    make = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)"
    change = "net.head = nn.Linear(8, 3); begin(net); optimizer.param_groups[0]['params'] = list(net.parameters())"
    card, _, truth = record(tmp_path, f"{CLASSIFIER}{make}\nbegin(net){LOOP.replace('CHANGE', change)}")
    assert count(card) == truth
    assert truth["self"][0] == truth["self"][1]


GAN = """
wrap = WRAP
generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
discriminator = nn.Sequential(wrap(nn.Linear(2, 8)), nn.LeakyReLU(0.2), wrap(nn.Linear(8, 1)))
of_d = torch.optim.Adam(discriminator.parameters(), 1e-3)
of_g = torch.optim.Adam(generator.parameters(), 1e-3)
begin(generator, discriminator)
for _ in range(12):
    fake = generator(torch.randn(16, 4)).detach()
    loss = (1 - discriminator(torch.randn(16, 2))).relu().mean() + (1 + discriminator(fake)).relu().mean()
    of_d.zero_grad(); loss.backward(); of_d.step()
    loss = -discriminator(generator(torch.randn(16, 4))).mean()
    of_g.zero_grad(); loss.backward(); of_g.step()
tell(generator=generator, discriminator=discriminator)
"""

CUSTOM = """lambda module: parametrize.register_parametrization(module, "weight", Scaled())
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
    def forward(self, weight):
        return weight * self.inner(torch.ones(1))
"""


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param("lambda module: module", id="plain", marks=pytest.mark.thorough),
        pytest.param("parametrizations.spectral_norm", id="spectral"),
        pytest.param("parametrizations.weight_norm", id="weight", marks=pytest.mark.thorough),
        pytest.param("parametrizations.orthogonal", id="orthogonal", marks=pytest.mark.thorough),
        pytest.param("nn.utils.spectral_norm", id="old spectral"),
        pytest.param(CUSTOM, id="custom"),
    ],
)
def test_the_two_models_of_a_gan_have_their_names_and_all_their_parameters(tmp_path: Path, wrap: str) -> None:
    card, settings, truth = record(tmp_path, GAN.replace("WRAP", wrap))
    assert count(card) == truth
    assert settings["parameters"] == sum(total for total, _ in truth.values())
    assert settings["batch"] == 16
    texts = sorted(re.sub(r" \[\d+ %\]", "", each.text) for each in card.of("loss"))
    assert texts == [
        "mean(relu((1 − discriminator(…)))) + mean(relu((discriminator(…) + 1)))",
        "−mean(discriminator(…))",
    ]
    assert {each.label for each in card.of("modes")} == set(truth)


def test_parametrized_layers_of_one_model_are_its_own(tmp_path: Path) -> None:
    program = f"""
wrap = {CUSTOM}
net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), parametrizations.orthogonal(nn.Linear(6, 6)))
net.append(wrap(nn.Linear(6, 1)))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
begin(net)
for _ in range(8):
    with parametrize.cached():
        loss = net(torch.randn(16, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
tell(self=net)
"""
    card, settings, truth = record(tmp_path, program)
    assert count(card) == truth == {"self": [settings["parameters"]] * 2}


TEACHER = """
data = torch.randn(400, 6)
teacher = TEACHER_MADE
TARGETS
student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
TRIAL
optimizer = torch.optim.SGD(student.parameters(), 0.1)
begin(teacher, student)
for rows in torch.randperm(400).split(20)[:12]:
    BODY
    loss = F.cross_entropy(student(data[rows]), targets[rows])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
student.eval()
with torch.no_grad():
    student(data)
tell(teacher=teacher, student=student)
"""


FROZEN, TRIAL = "nn.Linear(6, 3).requires_grad_(False)", "student(torch.zeros(1, 6))"
ONCE, RANDOM = "targets = teacher(data).argmax(1)", "targets = torch.randint(3, (400,))"
thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("targets", "body", "frozen", "trial"),
    [
        (ONCE, "pass", FROZEN, "pass"),
        (ONCE, "pass", "nn.Linear(6, 3)", "pass"),
        (ONCE, "teacher(data[:100])", "nn.Linear(6, 3)", TRIAL),
        (RANDOM, "teacher(data[rows])", FROZEN, TRIAL),
        pytest.param(ONCE, "pass", FROZEN, TRIAL, marks=thorough),
        pytest.param(ONCE, "pass", "nn.Linear(6, 3)", TRIAL, marks=thorough),
        pytest.param(RANDOM, "teacher(data[rows])", "nn.Linear(6, 3)", "pass", marks=thorough),
        pytest.param(ONCE, "teacher(data[:100])", FROZEN, "pass", marks=thorough),
    ],
)
def test_what_is_trained_is_the_model_of_the_run(
    tmp_path: Path, targets: str, body: str, frozen: str, trial: str
) -> None:
    program = TEACHER.replace("TEACHER_MADE", frozen).replace("TARGETS", targets)
    card, settings, truth = record(tmp_path, program.replace("BODY", body).replace("TRIAL", trial))
    assert truth["teacher"][1] == 0 < truth["student"][1]
    name = "self" if "self" in count(card) else "student"  # a model that comes first, and is trained, needs no name
    assert count(card) == {"teacher": truth["teacher"], name: truth["student"]}
    assert card.of("parameters")[0].values["model"] == name
    assert settings["batch"] == 20
    assert settings["parameters"] == truth["student"][0]
    assert card.of("input")[0].values["name"] == f"{name}:input.input"
    assert card.of("optimizer")[0].values["updates"] == 12


def test_a_teacher_without_gradients_leaves_the_student_alone(tmp_path: Path) -> None:
    program = TEACHER.replace("TEACHER_MADE", "nn.Linear(6, 3)").replace("TRIAL", "pass")
    program = program.replace("TARGETS", "with torch.no_grad(): targets = teacher(data).argmax(1)")
    card, settings, truth = record(tmp_path, program.replace("BODY", "pass"))
    assert count(card) == {"self": truth["student"]}
    assert settings["batch"] == 20


def test_what_is_said_of_two_optimizers_is_in_the_order_of_the_program(tmp_path: Path) -> None:
    program = """
enc, dec = nn.Linear(6, 4), nn.Linear(4, 3)
a, b = torch.optim.SGD(enc.parameters(), 0.1), torch.optim.SGD(dec.parameters(), 0.2)
begin(enc, dec)
for _ in range(8):
    x = torch.randn(16, 6)
    classes, level = F.cross_entropy(dec(enc(x)), torch.randint(3, (16,))), F.mse_loss(dec(enc(x)).sum(1), x.sum(1))
    a.zero_grad(); b.zero_grad()
    (classes + level).backward()
    a.step(); b.step()
tell(enc=enc, dec=dec)
"""
    card, settings, truth = record(tmp_path, program)
    assert count(card) == truth
    assert settings["batch"] == 16
    [update] = card.of("update")
    assert update.text == (
        "2 × (forward of enc → forward of dec) → 2 × zero_grad → backward → step of SGD → step of SGD_2"
    )
    assert [each.label for each in card.of("optimizer")] == ["SGD of enc", "SGD_2 of dec"]
    [loss] = card.of("loss")
    assert "cross_entropy(dec(…), target, mean)" in loss.text
    assert [(each.label, each.values["classes"]) for each in card.of("target")] == [("cross_entropy", 3)]


def test_a_vector_has_no_batch_size_and_a_compiled_model_has_the_names_of_its_own(tmp_path: Path) -> None:
    program = """
net = nn.Linear(4, 2)
MODEL
optimizer = torch.optim.SGD(net.parameters(), 0.1)
begin(net)
for _ in range(6):
    loss = F.cross_entropy(model(torch.randn(SHAPE)), torch.tensor(1))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
tell(self=net)
""".replace("torch.tensor(1)", "TARGET")
    vector = program.replace("MODEL", "model = net").replace("SHAPE", "4").replace("TARGET", "torch.tensor(1)")
    card, settings, truth = record(tmp_path, vector)
    assert count(card) == truth
    assert "batch" not in settings
    compiled = program.replace("MODEL", "model = torch.compile(net, backend='aot_eager')").replace("SHAPE", "5, 4")
    (tmp_path / "compiled").mkdir()
    card, settings, truth = record(tmp_path / "compiled", compiled.replace("TARGET", "torch.ones(5).long()"))
    assert count(card) == truth
    assert settings["batch"] == 5
    assert card.of("input")[0].values["name"] == "self:input.input"
    assert card.of("loss")[0].text.startswith("cross_entropy(model(…), target, mean)")


def test_evaluations_are_counted_in_rounds_and_updates_as_the_program_makes_them(tmp_path: Path) -> None:
    program = """
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
begin(net)
for epoch in range(3):
    for _ in range(4):
        loss = F.cross_entropy(net(torch.randn(8, 4)), torch.ones(8).long()) + 0 * net(torch.randn(8, 4)).sum()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    net.eval()
    with torch.no_grad():
        net(torch.randn(30, 4)), net(torch.randn(30, 4))
    net.train()
tell(self=net)
"""
    card, settings, truth = record(tmp_path, program)
    assert count(card) == truth
    assert settings["batch"] == 8
    [modes] = card.of("modes")
    assert modes.text == (
        "24 forwards in training mode with grad (in 12 steps); 6 forwards in eval mode without grad (in 3 rounds)"
    )
    assert card.of("optimizer")[0].values["updates"] == 12
