"""A zoo of small training runs of different kinds, and what one leaves behind, bit by bit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Models = nn.Module | dict[str, nn.Module]


@dataclass
class Now:
    """The row to which belongs what is computed now, as a trial says it of itself."""

    step: int = 0
    micro: int = 0
    backward: int = 0
    phase: str = "train"
    unscale: float = 1.0


now = Now()


def at(**where: Any) -> None:
    """What follows in this step is of this micro-batch, this backward pass over it, or this phase."""
    for name, value in where.items():
        setattr(now, name, value)


@dataclass
class Trial:
    """One training run.

    Attributes:
        models: what is recorded.
        step: makes one training step and returns what it computed: losses, outputs.
        evaluate: one forward in eval mode.
        optimizers: whose state belongs to the result.
        extra: what else of it a test may ask for; ``in parts`` begins the sites whose gradients come part by part.
        assessed: the phase of its evaluation.
    """

    models: Models
    step: Callable[[int], Any]
    evaluate: Callable[[], Any]
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    assessed: str = "eval"

    @property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.models) if isinstance(self.models, dict) else {"": self.models}

    def train_step(self, number: int) -> Any:
        for model in self.modules.values():
            model.train()
        at(step=number, micro=0, backward=0, phase="train", unscale=1.0)
        return self.step(number)

    def assess(self) -> Any:
        for model in self.modules.values():
            model.eval()
        at(step=now.step + 1, micro=0, phase=self.assessed)
        return self.evaluate()


ZOO: dict[str, Callable[[], Trial]] = {}
"""Nets of every kind, each trained as most are: what changes nothing is tried on all of them."""

WAYS: dict[str, Callable[[], Trial]] = {}
"""Ways to call, to differentiate and to update small nets."""


def trial(make: Callable[[], Trial]) -> Callable[[], Trial]:
    ZOO[make.__name__] = make
    return make


def way(make: Callable[[], Trial]) -> Callable[[], Trial]:
    WAYS[make.__name__] = make
    return make


def build(name: str) -> Trial:
    """A trial, always from the same seed."""
    torch.manual_seed(20)
    return (ZOO | WAYS)[name]()


def build_plain(name: str) -> Trial:
    """The same without checkpoints: no part is computed twice."""
    run = build(name)
    for model in run.modules.values():
        for module in model.modules():
            if hasattr(module, "way"):
                module.way = plainly
    return run


def train(run: Trial, steps: int = 3) -> list[tuple[str, bytes]]:
    """Train and evaluate in turns; everything that results, in order, as named bytes."""
    seen: list[tuple[str, bytes]] = []
    for number in range(steps):
        seen += bits(f"step {number}", run.train_step(number))
        seen += bits(f"gradients after {number}", [p.grad for p in parameters(run)])
        seen += bits(f"eval after {number}", run.assess())
    seen += bits("weights", [model.state_dict() for model in run.modules.values()])
    seen += bits("optimizers", [optimizer.state_dict() for optimizer in run.optimizers])
    seen += bits("rng", torch.get_rng_state())
    return seen


def parameters(run: Trial) -> Iterator[nn.Parameter]:
    return (parameter for model in run.modules.values() for parameter in model.parameters())


def bits(name: str, value: Any) -> list[tuple[str, bytes]]:
    """The bytes of every tensor and number in a nest, by name."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.is_sparse:
            value = value.coalesce()
            return bits(f"{name} indices", value.indices()) + bits(f"{name} values", value.values())
        flat = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return [(name, flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())]
    if isinstance(value, Mapping):
        return [each for key, item in value.items() for each in bits(f"{name}.{key}", item)]
    if isinstance(value, (list, tuple)):
        return [each for key, item in enumerate(value) for each in bits(f"{name}[{key}]", item)]
    return [(name, repr(value).encode())]


def supervised(
    model: nn.Module,
    batch: Callable[[], tuple[Any, ...]],
    loss: Callable[[Any], Tensor] = lambda out: out.float().square().mean(),
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> Trial:
    """The ordinary loop: zero_grad, forward, backward, step."""
    update = optimizer((p for p in model.parameters() if p.requires_grad), **(options or {"lr": 1e-2}))

    def step(number: int) -> Tensor:
        update.zero_grad()
        value = loss(model(*batch()))
        value.backward()
        update.step()
        return value

    def evaluate() -> Any:
        with torch.no_grad():
            return model(*batch())

    return Trial(model, step, evaluate, (update,), assessed="no_grad")


def noise(*shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(*shape),)


# ---- feed-forward ---------------------------------------------------------------------------------------------


@trial
def mlp() -> Trial:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return supervised(model, noise(5, 6), optimizer=torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)


class Residual(nn.Module):
    """A block with in-place ReLUs, BatchNorm and an in-place addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


@trial
def residual_convolutions() -> Trial:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(inplace=True),
        Residual(4),
        Residual(4),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    return supervised(model, noise(2, 1, 8, 8))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.layer(self.act(self.layer(y + x))) + self.act(y)


@trial
def shared_modules() -> Trial:
    return supervised(Shared(), noise(4, 5))


@trial
def dropout() -> Trial:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Dropout(0.2, inplace=True), nn.ReLU(), nn.Linear(8, 2))
    return supervised(model, noise(4, 6))


class Views(nn.Module):
    """Writes in place into views of a tensor, and into the tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.3, inplace=True)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 1.0
        left, right = x[:, :3], x[:, 3:]
        left += self.second(right.clone())
        self.drop(right)
        x[:, 0] *= 2.0
        x.mul_(0.5).t_()
        return self.act(x.t())


@trial
def views_in_place() -> Trial:
    return supervised(Views(), noise(4, 6))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, factor)
        y = x * factor
        ctx.mark_non_differentiable(y.sign())
        return y, y.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, factor = ctx.saved_tensors
        return gradient * factor, (gradient * x).sum()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y, sign = Scaled.apply(self.linear(x), self.factor)
        return y * sign


@trial
def custom_function() -> Trial:
    return supervised(Custom(), noise(3, 4))


class Nested(nn.Module):
    """Takes keywords and returns a dict; a part is frozen, one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, *, gain: float = 1.0, mask: Tensor | None = None) -> dict[str, Any]:
        hidden = self.body(self.frozen(x)) * gain
        if mask is not None:
            hidden = hidden.masked_fill(mask, 0.0)
        return {"logits": hidden, "hidden": (hidden, [x]), "loss": hidden.square().mean(), "name": "nested"}


@trial
def nested_outputs() -> Trial:
    model = Nested()
    update = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(number: int) -> Tensor:
        update.zero_grad(set_to_none=False)
        out = model(torch.randn(3, 4), gain=2.0, mask=torch.rand(3, 4) < 0.5)
        out["loss"].backward()
        update.step()
        return out["loss"]

    return Trial(model, step, lambda: model(torch.ones(2, 4))["logits"], (update,))


# ---- sequences ------------------------------------------------------------------------------------------------


class Loop(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for item in x.unbind(1):
            state = self.cell(item, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@trial
def lstm_cell() -> Trial:
    return supervised(Loop(nn.LSTMCell(3, 4)), noise(2, 6, 3))


@trial
def gru_cell() -> Trial:
    return supervised(Loop(nn.GRUCell(3, 4)), noise(2, 6, 3), optimizer=torch.optim.RMSprop, lr=1e-3)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        out, (hidden, _) = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return self.head(padded).sum(1) + hidden.sum()


@trial
def lstm() -> Trial:
    return supervised(Packed(), noise(3, 5, 3))


@trial
def transformer_encoder() -> Trial:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
    return supervised(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), noise(2, 5, 8))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(2, 5, 8))


@trial
def attention() -> Trial:
    return supervised(nn.Sequential(Attention(), Attention()), noise(2, 5, 8))


@trial
def gpt2() -> Trial:
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds, and may not be installed

    config = GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    update = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward() -> Tensor:
        tokens = torch.randint(31, (2, 8))
        return model(input_ids=tokens, labels=tokens).loss

    def step(number: int) -> Tensor:
        loss = forward()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad()
        return loss

    @torch.inference_mode()
    def evaluate() -> Tensor:
        return forward().clone()

    return Trial(model, step, evaluate, (update,), assessed="inference")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


@trial
def tied_weights() -> Trial:
    return supervised(Tied(), lambda: (torch.randint(9, (3, 4)),))


@trial
def sparse_embedding() -> Trial:
    model = nn.Sequential(
        nn.EmbeddingBag(20, 6, sparse=True, mode="sum"), nn.Linear(6, 2).requires_grad_(requires_grad=False)
    )
    return supervised(model, lambda: (torch.randint(20, (3, 4)),), optimizer=torch.optim.SparseAdam, lr=1e-2)


Run = Callable[..., Tensor]


def plainly(function: Run, *args: Tensor) -> Tensor:
    return function(*args)


def reentrantly(function: Run, *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=True)


def not_reentrantly(function: Run, *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=False)


class Checkpointed(nn.Module):
    def __init__(self, way: Run) -> None:
        super().__init__()
        self.way = way
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.ReLU(inplace=True)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.way(block, x) if self.training else block(x)
        return x


@trial
def checkpoint_reentrant() -> Trial:
    return supervised(Checkpointed(reentrantly), noise(3, 4))


@trial
def checkpoint_not_reentrant() -> Trial:
    return supervised(Checkpointed(not_reentrantly), noise(3, 4))


# ---- numbers --------------------------------------------------------------------------------------------------


@trial
def autocast_bfloat16() -> Trial:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 2))
    run = supervised(model, noise(5, 6))
    plain = run.step

    def step(number: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(number)

    run.step = step
    return run


@trial
def loss_scaling() -> Trial:
    """The second step overflows, so it is skipped."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(number: int) -> list[Tensor]:
        update.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 6)).float().square().mean()
        at(unscale=1 / scaler.get_scale())
        scaled = scaler.scale(loss * (float("inf") if number == 1 else 1.0))
        scaled.backward()
        scaler.unscale_(update)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(update)
        scaler.update()
        return [loss, scaled, torch.tensor(scaler.get_scale())]

    return Trial(model, step, lambda: model(torch.ones(2, 6)), (update,), {"scaler": scaler})


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5, dtype=torch.complex64)
        self.gate = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = self.mix(torch.fft.rfft(self.gate(x)))
        return torch.fft.irfft(spectrum.conj(), n=8)


@trial
def complex_numbers() -> Trial:
    return supervised(Complex(), noise(3, 8))


@trial
def double_precision() -> Trial:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 1)).double()
    return supervised(model, lambda: (torch.randn(3, 4, dtype=torch.float64),), optimizer=torch.optim.Adagrad)


# ---- loops ----------------------------------------------------------------------------------------------------


@trial
def gan() -> Trial:
    generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.3), nn.Linear(8, 1))
    g_update = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    d_update = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))

    def step(number: int) -> list[Tensor]:
        fake = generator(torch.randn(6, 3))
        d_update.zero_grad()
        d_loss = F.softplus(-critic(torch.randn(6, 4))).mean() + F.softplus(critic(fake.detach())).mean()
        d_loss.backward()
        d_update.step()
        g_update.zero_grad()
        g_loss = F.softplus(-critic(fake)).mean()
        g_loss.backward()
        g_update.step()
        return [d_loss, g_loss]

    return Trial(
        {"generator": generator, "critic": critic},
        step,
        lambda: critic(generator(torch.ones(2, 3))),
        (g_update, d_update),
    )


@trial
def accumulation_and_clipping() -> Trial:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    update = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> list[Tensor]:
        losses = []
        for micro in range(3):
            at(micro=micro)
            loss = model(torch.randn(3, 4)).square().mean() / 3
            loss.backward()
            losses.append(loss)
        losses.append(clip_grad_norm_(model.parameters(), 0.1))
        update.step()
        update.zero_grad()
        return losses

    return Trial(model, step, lambda: model(torch.ones(2, 4)), (update,))


@trial
def gradient_penalty() -> Trial:
    critic = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 1))
    update = torch.optim.Adam(critic.parameters(), lr=1e-2)

    def step(number: int) -> list[Tensor]:
        update.zero_grad()
        points = torch.randn(5, 4, requires_grad=True)
        score = critic(points)
        (slope,) = torch.autograd.grad(score.sum(), points, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = score.mean() + 10 * penalty
        at(backward=1)
        loss.backward()
        update.step()
        return [slope, loss, points.grad]

    return Trial(critic, step, lambda: critic(torch.ones(2, 4)), (update,))


@trial
def lbfgs() -> Trial:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    update = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def step(number: int) -> Tensor:
        x, micros = torch.randn(6, 3), count()

        def closure() -> Tensor:
            at(micro=next(micros))
            update.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        return update.step(closure)

    return Trial(model, step, lambda: model(torch.ones(2, 3)), (update,))


@trial
def updates_by_hand() -> Trial:
    model = nn.Sequential(nn.Linear(3, 4), nn.ELU(inplace=True), nn.Linear(4, 1))

    def step(number: int) -> Tensor:
        loss = model(torch.randn(6, 3)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        return loss

    return Trial(model, step, lambda: model(torch.ones(2, 3)))


@trial
def two_passes_over_one_graph() -> Trial:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    update = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> Tensor:
        update.zero_grad()
        out = model(torch.randn(6, 3))
        out[:, 0].square().mean().backward(retain_graph=True)
        at(backward=1)
        out[:, 1].abs().mean().backward()
        update.step()
        return out

    return Trial(model, step, lambda: model(torch.ones(2, 3)), (update,))


# ---- how modules are called -----------------------------------------------------------------------------------


def small(outputs: int = 1, inputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


def sgd(*models: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr)


def bare(models: Models, step: Callable[[int], Any], *optimizers: torch.optim.Optimizer) -> Trial:
    """A trial without evaluations."""
    return Trial(models, step, lambda: None, optimizers)


def trained(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None) -> Trial:
    """A trial without evaluations, whose steps differ by their loss alone."""
    update = optimizer or sgd(model)

    def step(number: int) -> Tensor:
        value = loss()
        value.backward()
        update.step()
        update.zero_grad()
        return value

    return bare(model, step, update)


class Returns(nn.Module):
    """Returns what a function makes of itself and its arguments."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.function(self, *args, **options)


@way
def another_number_of_calls_each_step() -> Trial:
    def repeat(net: Any, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = net.cell(x).tanh()
        return x

    model, times = Returns(repeat, cell=nn.Linear(4, 4)), cycle([7, 1, 3])
    return trained(model, lambda: model(torch.randn(3, 4), next(times)).square().sum())


@way
def two_forwards_before_one_backward() -> Trial:
    model = nn.Linear(3, 2)
    return trained(model, lambda: (model(torch.randn(4, 3)) - model(torch.randn(4, 3))).square().sum())


@way
def one_module_under_two_paths() -> Trial:
    shared = nn.Linear(3, 3)
    parts = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, nn.Tanh())})
    model = Returns(lambda net, x: net.parts["a"](x) + net.parts["b"](x * 2), parts=parts)
    return trained(model, lambda: model(torch.randn(2, 3)).square().sum())


@way
def recursion() -> Trial:
    def descend(net: Any, x: Tensor, depth: int) -> Tensor:
        return net.fc(x) if depth == 0 else net(x * 2, depth - 1) + net(x * 3, depth - 1)

    model = Returns(descend, fc=nn.Linear(2, 2))
    return trained(model, lambda: model(torch.ones(1, 2), 2).square().sum())


@way
def activations_in_place() -> Trial:
    kinds = (nn.ReLU, nn.SiLU, nn.ELU, nn.Hardtanh, nn.LeakyReLU, nn.Dropout)
    model = nn.Sequential(*(part for kind in kinds for part in (nn.Linear(5, 5), kind(inplace=True))))
    return trained(model, lambda: model(torch.randn(4, 5)).square().sum())


@way
def outputs_that_are_views_of_one() -> Trial:
    model = nn.Sequential(nn.Linear(3, 4), Returns(lambda _, x: (*x.chunk(2, dim=1), x.T, x[0])))

    def loss() -> Tensor:
        left, right, transposed, first = model(torch.randn(5, 3))
        return (left * 2 + right * 3).sum() + transposed.exp().sum() + first.sin().sum()

    return trained(model, loss)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Boxed:
    logits: Tensor
    hidden: list[Tensor]
    note: str = "not a tensor"


NESTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list in a tuple": lambda a, b: (None, [a, "text", b]),
    "named tuple": Pair,
    "dict": lambda a, b: {"a": a, "b": {"c": b}},
    "keys that are numbers": lambda a, b: {0: a, 1: [b]},
    "ordered dict": lambda a, b: OrderedDict(a=a, b=b),
    "dataclass": lambda a, b: Boxed(a, [b]),
}


@way
def nests_of_every_kind() -> Trial:
    parts = nn.ModuleList(Returns(lambda _, x, nest=nest: nest(x * 2, x.exp())) for nest in NESTS.values())

    def run(net: Any, x: Tensor) -> list[Any]:
        x = net.stem(x)
        return [part(x) for part in net.parts]

    model = Returns(run, stem=nn.Linear(3, 3), parts=parts)

    def loss() -> Tensor:
        found = tensors(model(torch.randn(2, 3)))
        return torch.stack([each.square().sum() * (1 + number) for number, each in enumerate(found)]).sum()

    return trained(model, loss)


def tensors(nest: Any) -> list[Tensor]:
    if isinstance(nest, Tensor):
        return [nest]
    if isinstance(nest, Boxed):
        return [nest.logits, *nest.hidden]
    items = nest.values() if isinstance(nest, Mapping) else nest if isinstance(nest, (list, tuple)) else ()
    return [each for item in items for each in tensors(item)]


@way
def modules_that_hand_their_input_on() -> Trial:
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Flatten(1), nn.Dropout(0.0), nn.Linear(3, 1))
    return trained(model, lambda: model(torch.randn(4, 3)).square().sum())


@way
def a_module_that_returns_its_parameter() -> Trial:
    model = nn.Sequential(Returns(lambda module, x: module.weight), nn.Linear(3, 1))
    model[0].weight = nn.Parameter(torch.tensor([0.5, -2.0, 3.0]))
    return trained(model, lambda: model(torch.ones(1)).square().sum())


@way
def a_parametrized_weight() -> Trial:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    return trained(model, lambda: model(torch.randn(4, 3)).square().sum())


@way
def another_method_than_forward() -> Trial:
    def refuse(*_: Any) -> None:
        raise NotImplementedError

    model: Any = Returns(refuse, encoder=nn.Linear(3, 2), decoder=nn.Linear(2, 3))
    update = sgd(model)

    def step(number: int) -> None:
        for micro in range(2):
            at(micro=micro)
            x = torch.randn(4, 3)
            (model.decoder(model.encoder(x)) - x).square().mean().backward()
        update.step()

    return bare(model, step, update)


@way
def functional_calls() -> Trial:
    model = small()

    def loss() -> Tensor:
        given = dict(model.named_parameters())
        return torch.func.functional_call(model, given, (torch.randn(4, 3),)).square().sum()

    return trained(model, loss)


@way
def hooks_of_the_user() -> Trial:
    """Of every kind, and some that change what goes by."""
    model = small()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda module, args, output: output + 1)
    model[2].register_full_backward_hook(lambda module, inputs, outputs: None)
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)

    def loss() -> Tensor:
        out = model(torch.randn(4, 3))
        out.register_hook(lambda gradient: gradient * 0.5)
        out.retain_grad()
        return out.square().sum()

    return trained(model, loss)


# ---- how they are differentiated ------------------------------------------------------------------------------


@way
def passes_of_three_kinds() -> Trial:
    model = small()
    update = sgd(model)

    def step(number: int) -> Any:
        out = model(torch.randn(5, 3))
        out.sum().backward(retain_graph=True)
        at(backward=1)
        engine = torch.autograd.Variable._execution_engine  # as compiled extensions do
        engine.run_backward((out.square().sum(),), (torch.ones(()),), True, False, (), True, True)
        at(backward=2)
        found = torch.autograd.grad(out.exp().sum(), list(model.parameters()))
        update.step()
        return found

    return bare(model, step, update)


@way
def heads_one_after_the_other() -> Trial:
    def run(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = net.trunk(x)
        return net.left(h), net.right(h)

    model = Returns(run, trunk=nn.Linear(3, 3), left=nn.Linear(3, 1), right=nn.Linear(3, 1))
    update = sgd(model)

    def step(number: int) -> None:
        left, right = model(torch.randn(4, 3))
        left.sum().backward(retain_graph=True)
        at(backward=1)
        right.square().sum().backward()
        update.step()

    return bare(model, step, update)


@way
def a_pass_within_the_forward() -> Trial:
    def force(net: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(net.energy(x).sum(), x, create_graph=True)
        return -slope

    model = Returns(force, energy=small())
    update = sgd(model)

    def step(number: int) -> None:
        update.zero_grad()
        out = model(torch.randn(5, 3))
        at(backward=1)
        out.square().sum().backward()
        update.step()

    return bare(model, step, update)


@way
def a_pass_of_another_graph_in_between() -> Trial:
    model, other = small(), small()
    update, theirs = sgd(model), sgd(other)

    def loss() -> Tensor:
        out = model(torch.randn(5, 3))
        other(torch.randn(5, 3)).sum().backward()
        theirs.step()

        def inner(gradient: Tensor) -> None:
            with torch.enable_grad():
                (torch.ones(1, requires_grad=True) * 2).sum().backward()

        out.register_hook(inner)
        return out.sum()

    return trained(model, loss, update)


@way
def a_teacher_between_forward_and_backward() -> Trial:
    model = small()

    def loss() -> Tensor:
        x = torch.randn(5, 3)
        out = model(x)
        at(phase="no_grad")
        with torch.no_grad():
            target = model(x * 2)
        at(phase="train")
        return (out - target).square().sum()

    return trained(model, loss)


@way
def parts_without_grad() -> Trial:
    def run(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = net.teacher(x)
        with torch.inference_mode():
            net.teacher(x)
        return (net.student(x) - target).square().mean()

    model = Returns(run, student=nn.Linear(3, 2), teacher=nn.Linear(3, 2))
    return trained(model, lambda: model(torch.randn(4, 3)))


@way
def training_in_eval_mode() -> Trial:
    model = small()
    return trained(model, lambda: model.eval()(torch.randn(4, 3)).square().sum())


def evaluated(context: Callable[[], Any], phase: str) -> Trial:
    """Several forwards of one evaluation, which add up."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    run = trained(model, lambda: model(torch.randn(5, 3)).square().sum())

    def evaluate() -> list[Tensor]:
        with context():
            return [model(torch.randn(size, 3)).clone() for size in (4, 4, 2)]

    run.evaluate, run.assessed = evaluate, phase
    return run


WAYS |= {
    f"evaluations_{phase}": partial(evaluated, context, phase)
    for context, phase in ((torch.no_grad, "no_grad"), (torch.inference_mode, "inference"), (torch.enable_grad, "eval"))
}


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(function: Run, *args: Tensor) -> Tensor:
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(keep_products),
    )


def without_early_stop(function: Run, *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=False, early_stop=False)


def checkpointed(way: Run) -> Trial:
    """One block everywhere: twice in the first part, in a part within the second, and outside; two micro-batches."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = net.stem(x)
        h = net.way(lambda h: net.block(net.block(h) * 2), h)
        h = net.way(lambda h: net.block(net.way(lambda h: net.block(h) + net.block(h * 0.5), h) - 1) * 3, h)
        with torch.no_grad():
            net.block(h)
        return net.head(net.block(h))

    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3))
    model: Any = Returns(run, stem=nn.Linear(3, 4), block=block, head=nn.Linear(4, 1))
    model.way, update = way, sgd(model, lr=0.01)

    def step(number: int) -> None:
        update.zero_grad()
        for micro in range(2):
            at(micro=micro)
            model(torch.randn(5, 3)).square().mean().backward()
        update.step()

    run = bare(model, step, update)
    run.extra["in parts"] = "block." if way is reentrantly else None
    return run


WAYS |= {
    f"checkpoints_{each.__name__}": partial(checkpointed, each)
    for each in (reentrantly, not_reentrantly, without_early_stop, selectively)
}


# ---- how they are updated -------------------------------------------------------------------------------------


def write_past_autograd(parameter: Tensor, gradient: Tensor) -> None:
    parameter.data.sub_(gradient.data * 0.01)


def write_without_grad(parameter: Tensor, gradient: Tensor) -> None:
    with torch.no_grad():
        parameter -= gradient * 0.01


def by_hand(write: Callable[[Tensor, Tensor], None], zero: str, micros: int = 1) -> Trial:
    """Updates without an optimizer; gradients are set to zero at one of many places."""
    model = small()

    def step(number: int) -> None:
        if zero == "before":
            model.zero_grad(set_to_none=False)
        for micro in range(micros):
            at(micro=micro)
            loss = model(torch.randn(4, 3)).square().sum()
            if zero == "after forward" and not micro:
                model.zero_grad()
            if zero == "never":
                gradients: Any = torch.autograd.grad(loss, list(model.parameters()))
            else:
                loss.backward()
                gradients = [parameter.grad for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            write(parameter, gradient)
        if zero.startswith("after") or zero == "to none":
            model.zero_grad(set_to_none=zero == "to none")

    return bare(model, step)


WAYS |= {
    f"by_hand {write.__name__} zero {zero} {micros}": partial(by_hand, write, zero, micros)
    for write in (write_past_autograd, write_without_grad)
    for zero, micros in (("before", 1), ("after forward", 1), ("after", 1), ("to none", 1), ("after", 2), ("never", 1))
}


@way
def no_update_at_all() -> Trial:
    model = small()

    def step(number: int) -> None:
        at(step=0, micro=number)
        model(torch.randn(4, 3)).square().sum().backward()

    return bare(model, step)


@way
def a_closure_that_runs_once() -> Trial:
    model = small()
    update = torch.optim.AdamW(model.parameters())

    def closure() -> Tensor:
        update.zero_grad()
        loss = model(torch.randn(4, 3)).square().sum()
        loss.backward()
        return loss

    return bare(model, lambda number: update.step(closure), update)


def replaced(first: slice, second: slice) -> Trial:
    """One optimizer in the first step, and another one from then on."""
    model = small()
    one = sgd(model[first])
    two: list[torch.optim.Optimizer] = []

    def step(number: int) -> None:
        if number == 1:
            two.append(torch.optim.Adam(model[second].parameters(), lr=0.1))
        model(torch.randn(4, 3)).square().sum().backward()
        (two[0] if two else one).step()

    return bare(model, step, one)


WAYS |= {
    "an_optimizer_replaced": partial(replaced, slice(3), slice(3)),
    "an_optimizer_replaced_by_one_of_less": partial(replaced, slice(3), slice(1)),
    "an_optimizer_replaced_by_one_of_more": partial(replaced, slice(2, 3), slice(3)),
}


@way
def two_optimizers_that_step_together() -> Trial:
    model = small()
    optimizers = (sgd(model[0]), torch.optim.Adam(model[2].parameters(), lr=0.1))

    def step(number: int) -> None:
        model(torch.randn(4, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    return bare(model, step, *optimizers)


@way
def optimizers_that_step_within_backward() -> Trial:
    model = small()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return bare(model, lambda number: model(torch.randn(4, 3)).square().sum().backward(), *optimizers.values())


def turns(order: str) -> Trial:
    """Models that do not run together, each with an optimizer of its own: each update is a step of one of them."""
    models: dict[str, nn.Module] = {name: small() for name in "abc"}
    optimizers = {name: sgd(model) for name, model in models.items()}

    def step(number: int) -> None:
        for index in range(3 * number, 3 * number + 3):
            at(step=index)
            name = order[index]
            models[name](torch.randn(4, 3)).square().sum().backward()
            optimizers[name].step()

    return bare(models, step, *optimizers.values())


WAYS |= {f"models_by_turns {order}": partial(turns, order) for order in ("aaabbbccc", "abcabcabc", "abbbcccab")}


def copies(part: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """An optimizer of copies, and what hands over gradients, updates, and hands back the weights."""
    held = [parameter.detach().clone().requires_grad_() for parameter in part.parameters()]
    optimizer = torch.optim.Adam(held, lr=0.1)

    def update() -> None:
        for other, parameter in zip(held, part.parameters(), strict=True):
            other.grad = None if parameter.grad is None else parameter.grad.clone()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for other, parameter in zip(held, part.parameters(), strict=True):
                parameter.copy_(other)

    return optimizer, update


def of_copies(micros: int, halves: bool) -> Trial:
    model = small()
    ways = [copies(model[0]), copies(model[2])] if halves else [copies(model)]

    def step(number: int) -> None:
        for micro in range(micros):
            at(micro=micro)
            model(torch.randn(4, 3)).square().sum().backward()
        for _, update in ways:
            update()

    return bare(model, step, *(optimizer for optimizer, _ in ways))


WAYS |= {
    "an_optimizer_of_copies": partial(of_copies, 1, False),
    "an_optimizer_of_copies_in_accumulation": partial(of_copies, 2, False),
    "two_optimizers_of_copies": partial(of_copies, 1, True),
}


@way
def another_model_that_is_trained_first() -> Trial:
    model, other = small(), small()
    ours, theirs = sgd(model), sgd(other)

    def step(number: int) -> None:
        for _ in range(0 if number else 3):
            other(torch.randn(4, 3)).sum().backward()
            theirs.step()
        model(torch.randn(4, 3)).sum().backward()
        ours.step()
        other(torch.randn(4, 3)).sum().backward()
        theirs.step()

    return bare(model, step, ours, theirs)


@way
def an_input_that_is_optimized() -> Trial:
    model = small().requires_grad_(requires_grad=False)
    picture = torch.randn(4, 3, requires_grad=True)
    update = torch.optim.LBFGS([picture], max_iter=3, history_size=2)

    def step(number: int) -> Tensor:
        micros = count()

        def closure() -> Tensor:
            at(micro=next(micros))
            update.zero_grad()
            loss = model(picture).square().sum()
            loss.backward()
            return loss

        update.step(closure)
        return picture.clone()

    return bare(model, step, update)


# ---- how losses are scaled ------------------------------------------------------------------------------------


def scaled(micros: int, divided: bool) -> Trial:
    """A scaler whose scale grows in each step; losses are divided before they are scaled, or after."""
    model = small()
    update = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)

    def step(number: int) -> Tensor:
        at(unscale=1 / scaler.get_scale())
        for micro in range(micros):
            at(micro=micro)
            loss = model(torch.randn(5, 3)).square().sum()
            (scaler.scale(loss) / micros if divided else scaler.scale(loss / micros)).backward()
        scaler.step(update)
        scaler.update()
        update.zero_grad()
        return torch.tensor(scaler.get_scale())

    return bare(model, step, update)


@way
def each_pass_with_a_scale_of_its_own() -> Trial:
    model = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(number: int) -> None:
        at(step=0, micro=number)
        out = model(torch.randn(5, 3)).sum()
        out.backward(retain_graph=True)
        at(backward=1, unscale=2.0**-12)
        scaler.scale(out).backward(retain_graph=True)
        at(backward=2, unscale=1.0)
        (out * 3).backward()

    return bare(model, step)


@way
def two_losses_scaled_before_the_first_pass() -> Trial:
    model = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(number: int) -> None:
        at(step=0, micro=number, unscale=2.0**-12)
        out = model(torch.randn(5, 3))
        first, second = scaler.scale([out.sum(), out.square().sum()])
        first.backward(retain_graph=True)
        at(backward=1)
        second.backward()

    return bare(model, step)


WAYS |= {
    "a_scale_that_grows": partial(scaled, 1, False),
    "a_scale_in_accumulation": partial(scaled, 2, False),
    "a_loss_divided_after_scaling": partial(scaled, 2, True),
}
