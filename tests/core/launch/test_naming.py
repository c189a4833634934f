from __future__ import annotations

import weakref

import pytest
from torch import nn

from retrograd.core.launch.models import choose_names


class Critic(nn.Linear):
    pass


class ImageEncoder(nn.Linear):
    pass


def test_a_single_model_has_no_name() -> None:
    net = nn.Linear(1, 1)
    assert choose_names([net]) == {"": net}


def test_models_are_named_for_the_variables_that_hold_them() -> None:
    generator, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    assert choose_names([critic, generator]) == {"critic": critic, "generator": generator}
    assert choose_names([generator], taken={""}) == {"generator": generator}
    assert choose_names([generator], taken={"generator"}) == {"generator_2": generator}


def test_the_callers_variable_comes_before_that_of_a_function() -> None:
    def train(model: nn.Module) -> dict[str, nn.Module]:
        return choose_names([model], taken={"other"})

    student = nn.Linear(1, 1)
    assert train(student) == {"student": student}


def test_a_trainers_attribute_is_a_name() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.actor, self.value = nn.Linear(1, 1), nn.Linear(1, 1)

        def train(self) -> dict[str, nn.Module]:
            return choose_names([self.value, self.actor])

    trainer = Trainer()
    assert trainer.train() == {"value": trainer.value, "actor": trainer.actor}


def test_a_class_is_the_last_resort() -> None:
    models = [Critic(1, 1), ImageEncoder(1, 1), Critic(1, 1)]
    assert list(choose_names(models)) == ["critic", "image_encoder", "critic_2"]


def test_what_wraps_a_model_gives_it_its_name() -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    wrapped = DistributedDataParallel(Critic(1, 1))
    assert choose_names([wrapped.module], taken={""}) == {"wrapped": wrapped.module}


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_frame_holds_no_more_than_before(is_asked_for: bool) -> None:
    """It does by itself, up to Python 3.12; a dict that the program has got from ``locals()`` stays as it is."""
    teacher, student = nn.Linear(1, 1), nn.Linear(1, 1)
    mine = locals() if is_asked_for else {}
    assert set(choose_names([teacher, student])) == {"teacher", "student"}
    if is_asked_for:
        assert mine["teacher"] is teacher
        mine.clear()
    gone = weakref.ref(teacher)
    del teacher
    assert gone() is None
