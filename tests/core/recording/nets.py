"""A zoo of small training runs of different kinds, and what one leaves behind, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

Models = nn.Module | dict[str, nn.Module]


@dataclass
class Trial:
    """One training run.

    Attributes:
        models: what is recorded.
        step: makes one training step and returns what it computed: losses, outputs.
        evaluate: one forward in eval mode.
        optimizers: whose state belongs to the result.
    """

    models: Models
    step: Callable[[int], Any]
    evaluate: Callable[[], Any]
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.models) if isinstance(self.models, dict) else {"": self.models}

    def train_step(self, number: int) -> Any:
        for model in self.modules.values():
            model.train()
        return self.step(number)

    def assess(self) -> Any:
        for model in self.modules.values():
            model.eval()
        return self.evaluate()


ZOO: dict[str, Callable[[], Trial]] = {}


def trial(make: Callable[[], Trial]) -> Callable[[], Trial]:
    ZOO[make.__name__] = make
    return make


def build(name: str) -> Trial:
    """A trial, always from the same seed."""
    torch.manual_seed(20)
    return ZOO[name]()


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

    return Trial(model, step, evaluate, (update,))


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

    return Trial(model, step, evaluate, (update,))


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


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.ReLU(inplace=True)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return x


@trial
def checkpoint_reentrant() -> Trial:
    return supervised(Checkpointed(reentrant=True), noise(3, 4))


@trial
def checkpoint_not_reentrant() -> Trial:
    return supervised(Checkpointed(reentrant=False), noise(3, 4))


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
        for _ in range(3):
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
        loss.backward()
        update.step()
        return [slope, loss, points.grad]

    return Trial(critic, step, lambda: critic(torch.ones(2, 4)), (update,))


@trial
def lbfgs() -> Trial:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    update = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def step(number: int) -> Tensor:
        x = torch.randn(6, 3)

        def closure() -> Tensor:
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
        out[:, 1].abs().mean().backward()
        update.step()
        return out

    return Trial(model, step, lambda: model(torch.ones(2, 3)), (update,))
