"""Faulty programs, each with what is advised, and the change of its text that carries that out."""

from __future__ import annotations

from dataclasses import dataclass

Change = tuple[str, str]
"""A text, and what stands there instead."""

BASE = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
truth = torch.randn(8, 3)
# training
for step in range(STEPS):
    x = torch.randn(32, 8)
    y = (x @ truth).argmax(1)
    optimizer.zero_grad()
    out = net(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
"""
"""A program with which nothing is wrong."""


DROPS = """
class Drops(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.2)
"""


@dataclass(frozen=True)
class Fault:
    """A fault of a program.

    Attributes:
        slug: the detector that sees it.
        words: of what it advises, those that are carried out.
        plant: what is changed in the base to make the fault.
        remedy: what is changed in the faulty program.
        kind: tells it from others of the detector.
        base, steps: the program without the fault.
    """

    slug: str
    words: str
    plant: tuple[Change, ...]
    remedy: tuple[Change, ...] = ()
    kind: str = ""
    base: str = BASE
    steps: int = 40

    @property
    def name(self) -> str:
        """Its detector, and its kind."""
        return f"{self.slug}/{self.kind}" if self.kind else self.slug

    @property
    def faulty(self) -> str:
        """The program with the fault."""
        return _change(self.base.replace("STEPS", str(self.steps)), self.plant)

    @property
    def mended(self) -> str:
        """The program in which the remedy is carried out; the base itself where none is given."""
        if not self.remedy:
            return self.base.replace("STEPS", str(self.steps))
        return _change(self.faulty, self.remedy)


def _change(text: str, changes: tuple[Change, ...]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, f"{text.count(old)} times: {old!r}"
        text = text.replace(old, new)
    return text


LOSS = "F.cross_entropy(out, y)"
NET = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))"
MADE = "torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)"
OUT = "out = net(x)"
X = "x = torch.randn(32, 8)\n"
UPDATE = "    loss.backward()\n    optimizer.step()\n"
CLEAR = "    optimizer.zero_grad()\n"

REGRESSION = (
    BASE.replace("nn.Linear(16, 3))", "nn.Linear(16, 1))")
    .replace("(x @ truth).argmax(1)", "x @ truth[:, :1]")
    .replace(LOSS, "F.mse_loss(out, y)")
    .replace("lr=0.1, momentum=0.9", "lr=0.02")
)

MICRO = BASE.replace(
    BASE[BASE.index("    x = torch") :],
    """    optimizer.zero_grad()
    for micro in range(4):
        x = torch.randn(32, 8)
        loss = F.cross_entropy(net(x), (x @ truth).argmax(1)) / 4
        loss.backward()
    optimizer.step()
""",
)

SEQUENCES = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(12, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 12))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
# training
for step in range(STEPS):
    tokens = torch.zeros(16, 20, dtype=torch.long)
    for row in range(16):
        length = 4 + row % 4
        tokens[row, :length] = (torch.randint(0, 11, ()) + torch.arange(length)) % 11 + 1
    optimizer.zero_grad()
    logits = net(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
    loss.backward()
    optimizer.step()
"""
"""A language model of rows of different length."""

ATTENDING = SEQUENCES.replace(
    "net = nn.Sequential(nn.Embedding(12, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 12))\n",
    """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(12, 24), nn.Linear(24, 12)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
    def forward(self, tokens):
        h = self.words(tokens)
        return self.out(h + self.attention(h, h, h, key_padding_mask=(tokens == 0))[0])
net = Net()
""",
)

VIEWS = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
# training
for step in range(STEPS):
    x = torch.randn(32, 16)
    one, two = net(x + 0.1 * torch.randn_like(x)), net(x + 0.1 * torch.randn_like(x))
    loss = F.cross_entropy(-torch.cdist(one, two), torch.arange(32))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CLIPPED = BASE.replace(
    UPDATE, "    loss.backward()\n    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    optimizer.step()\n"
)
SCALED = BASE.replace("truth =", 'scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)\ntruth =').replace(
    UPDATE,
    """    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
)
MODULE = "torch.manual_seed(0)\n"
IN_A_HOOK = "in a gradient hook"
HIDDEN = """torch.manual_seed(0)
class Hidden(nn.Module):
    def forward(self, x):
        return {}
"""
SCHEDULED = (
    BASE.replace("truth =", "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)\ntruth =")
    + "    if step % 10 == 9:\n        scheduler.step()\n"
)

ORDERED = BASE.replace(BASE[BASE.index("net = ") : BASE.index("optimizer =")], """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.place, self.head = nn.Linear(2, 16), nn.Embedding(40, 16), nn.Linear(16, 2)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    def forward(self, x):
        places = self.place(torch.arange(x.size(1)))
        return self.head(self.layer(self.inner(x) + places).mean(1))
net = Net()
""").replace("x = torch.randn(32, 8)", "x = torch.randn(32, 6, 2)").replace(
    "(x @ truth).argmax(1)", "(x[:, :3, 0].sum(1) > x[:, 3:, 0].sum(1)).long()"
)  # fmt: skip

DEEP_LAYERS = "*[layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.ReLU())]"
DEEP = BASE.replace("nn.ReLU(), nn.Linear(16, 3)", f"nn.ReLU(), {DEEP_LAYERS}, nn.Linear(16, 3)")
INITIALISED = DEEP.replace(
    "optimizer =",
    "for each in net.modules():\n    if isinstance(each, nn.Linear):\n        nn.init.zeros_(each.bias)\n"
    "        nn.init.kaiming_normal_(each.weight)\noptimizer =",
).replace("lr=0.1, momentum=0.9", "lr=0.02")
NORMED = BASE.replace("nn.Linear(8, 16), nn.ReLU()", "nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()")

LINES = ("optimizer =", "net[2].weight.data.mul_(0.01)\nnet[2].bias.data.fill_(0.5)\noptimizer =")
"""Outputs that lie between 0 and 1."""

LISTED = """torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 16)]
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.layers[0](x).relu())
"""
WORDS = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 12, bias=False))
net[3].weight = net[0].weight
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
# training
for step in range(STEPS):
    x = torch.randint(0, 12, (32,))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), (x + 1) % 12)
    loss.backward()
    optimizer.step()
"""

BLIND = """torch.manual_seed(0)
class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    @torch.no_grad()
    def forward(self, x):
        return self.inner(x)
"""
NORM = "nn.Linear(8, 16), nn.BatchNorm1d(16)"
PRODUCT = """torch.manual_seed(0)
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w, x.T @ gradient
"""

FEW_FRAMES = " + 0.001 * F.ctc_loss(out[:5, None].log_softmax(-1), torch.tensor([[1, 1, 2, 2]]), (5,), (4,))"
FRAMES = (("out[:5, None]", "out[:7, None]"), ("(5,), (4,)", "(7,), (4,)"))
ENTROPY = """torch.manual_seed(0)
hidden = torch.tensor([False, False, True])
def entropy_of(logits):
    lp = logits.log_softmax(-1)
    return -(lp.exp() * lp).sum(-1).mean()
"""
MASKED = LOSS + " - 0.001 * entropy_of(out.masked_fill(hidden, -torch.inf))"

FAULTS = (
    Fault(
        "underflow",
        "or to bfloat16",
        ((NET, NET + ".half()"), (OUT, "out = net(x.half())"), (LOSS, LOSS + " * 1e-6")),
        (
            (".half()\n", "\n"),
            ("out = net(x.half())", 'with torch.autocast("cpu", torch.bfloat16):\n        out = net(x)'),
        ),
        "bfloat16",
    ),
    Fault(
        "missing-gradient",
        "stay with tensors: leave `tolist` out there",
        ((MODULE, HIDDEN.format("torch.tensor(x.tolist())")), ("nn.ReLU()", "Hidden()")),
        (("torch.tensor(x.tolist())", "x.relu()"),),
        "copied",
    ),
    Fault(
        "missing-gradient",
        "pass the gradient straight through",
        ((MODULE, HIDDEN.format("x.round()")), ("nn.ReLU()", "Hidden()")),
        (("x.round()", "x + (x.round() - x).detach()"),),
        "flat",
    ),
    Fault(
        "missing-gradient",
        "run the forward outside of torch.no_grad()",
        (
            (MODULE, BLIND),
            ("nn.ReLU()", "Hidden()"),
        ),
        (("    @torch.no_grad()\n", ""), ("self.inner(x)", "self.inner(x).relu()")),
        "no_grad",
    ),
    Fault(
        "weight-decay-dominates",
        "1e-2 or less with AdamW",
        ((MADE, "torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=20.0)"),),
        (("decay=20.0", "decay=1e-2"),),
        "AdamW",
    ),
    Fault(
        "weight-decay-dominates",
        "0 with Adam",
        ((MADE, "torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=20.0)"),),
        (("decay=20.0", "decay=0.0"),),
        "Adam",
    ),
    Fault(
        "dropout-in-evaluation",
        "pass `training=self.training`",
        (
            ("# training", DROPS + "net = nn.Sequential(net[0], nn.ReLU(), Drops(), net[2])\n# training"),
            (
                "    optimizer.step()",
                "    optimizer.step()\n    net.eval()\n    with torch.no_grad():\n        net(x)\n    net.train()",
            ),
        ),
        (("F.dropout(x, 0.2)", "F.dropout(x, 0.2, training=self.training)"),),
    ),
    Fault(
        "bad-init",
        "leave torch's own",
        (("nn.init.kaiming_normal_(each.weight)", "nn.init.normal_(each.weight, 0, 3)"),),
        (("        nn.init.normal_(each.weight, 0, 3)\n", ""),),
        "own",
        base=INITIALISED,
    ),
    Fault(
        "symmetric-init",
        "leave torch's own",
        (("nn.init.kaiming_normal_(each.weight)", "nn.init.constant_(each.weight, 0.1)"),),
        (("        nn.init.constant_(each.weight, 0.1)\n", ""),),
        "own",
        base=INITIALISED,
    ),
    Fault(
        "saturated",
        "Scale the inputs to unit variance",
        (("nn.ReLU()", "nn.Tanh()"), (OUT, "out = net(x * 300)")),
        (("x * 300", "x"),),
        "inputs",
    ),
    Fault("batch-norm", "a larger momentum", (("Norm1d(16)", "Norm1d(16, momentum=0.0)"),), kind="zero", base=NORMED),
    Fault(
        "batch-norm",
        "call 0.eval() behind each train() of the model",
        (
            (NORM, f"nn.Sequential({NORM})"),
            ("nn.ReLU(),", "nn.ReLU(),"),
            ("optimizer =", "net[0].requires_grad_(False)\noptimizer ="),
            (OUT, "net.train()\n    out = net(x)"),
        ),
        (("net.train()", "net.train()\n    net[0].eval()"),),
        "frozen",
        base=NORMED,
    ),
    Fault(
        "failed", "as many outputs as there are classes", (("nn.Linear(16, 3)", "nn.Linear(16, 2)"),), kind="classes"
    ),
    Fault(
        "failed",
        "reduce the loss with .mean()",
        ((LOSS, LOSS.replace("y)", "y, reduction='none')")),),
        (("loss.backward()", "loss.mean().backward()"),),
        "no scalar",
    ),
    Fault(
        "failed",
        "use reshape, or contiguous() first",
        ((LOSS, "F.cross_entropy(out.T.view(-1, 3), y)"),),
        ((".view(", ".reshape("),),
        "view",
    ),
    Fault(
        "failed",
        "or call eval()",
        ((OUT, "net(x[:1])\n    out = net(x)"),),
        (("net(x[:1])", "net.eval()(x[:1])\n    net.train()"),),
        "one sample",
        base=NORMED,
    ),
    Fault(
        "failed",
        "call detach() first",
        ((OUT, "out = net(x)\n    out.numpy()"),),
        (("out.numpy()", "out.detach().numpy()"),),
        "numpy",
    ),
    Fault(
        "failed",
        "write to it under torch.no_grad()",
        ((OUT, "net[0].weight.mul_(0.99)\n    out = net(x)"),),
        (("net[0].weight.mul_(0.99)", "with torch.no_grad():\n        net[0].weight.mul_(0.99)"),),
        "leaf",
    ),
    Fault(
        "failed",
        "permute the input to (batch, channels, …)",
        (
            (NET, "nn.Sequential(nn.Conv1d(4, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))"),
            (OUT, "out = net(x.view(32, 2, 4))"),
        ),
        (("view(32, 2, 4)", "view(32, 2, 4).permute(0, 2, 1)"),),
        "channels",
    ),
    Fault(
        "failed",
        "the shape of that input",
        ((MODULE, PRODUCT), (OUT, "out = Product.apply(net(x), torch.ones(3, 5, requires_grad=True))[:, :3]")),
        (("gradient @ w, x.T", "gradient @ w.T, x.T"),),
        "backward",
    ),
    Fault(
        "nan-input",
        "torch.nan_to_num",
        ((X, X + "    x[0, 0] = torch.nan if step == 20 else 0\n"),),
        (("if step == 20 else 0\n", "if step == 20 else 0\n    x = torch.nan_to_num(x)\n"),),
    ),
    Fault(
        "nan-forward",
        "a small number inside of the log",
        ((LOSS, LOSS + " + 0.001 * (out * (step != 20)).abs().log().mean()"),),
        ((".abs().log()", ".abs().add(1e-3).log()"),),
    ),
    Fault(
        "nan-backward",
        "clamp(min=eps)",
        ((LOSS, LOSS + " + (out[0] * (step != 20)).abs().sqrt().mean()"),),
        ((".abs().sqrt()", ".abs().clamp(min=1e-6).sqrt()"),),
    ),
    Fault(
        "nan-backward",
        "clamp(min=eps)",
        ((LOSS, LOSS + " + 0.001 * torch.where(out > 0, out.sqrt(), out).mean()"),),
        (("out.sqrt()", "out.clamp(min=1e-6).sqrt()"),),
        "hidden root",
    ),
    Fault(
        "nan-forward",
        "zero_infinity=True",
        ((LOSS, LOSS + FEW_FRAMES),),
        (("(5,), (4,)", "(5,), (4,), zero_infinity=True"),),
        "zero_infinity",
    ),
    Fault("nan-forward", "longer inputs", ((LOSS, LOSS + FEW_FRAMES),), FRAMES, "longer inputs"),
    Fault(
        "nan-forward",
        "a finite number, as −1e4",
        ((MODULE, ENTROPY), (LOSS, MASKED)),
        (("-torch.inf", "-1e4"),),
        "finite mask",
    ),
    Fault(
        "nan-forward",
        "in front of the product (masked_fill)",
        ((MODULE, ENTROPY), (LOSS, MASKED)),
        (("lp.exp() * lp)", "lp.exp() * lp.masked_fill(hidden, 0))"),),
        "masked product",
    ),
    Fault(
        "nan-update",
        "an eps above 0",
        ((MADE, "torch.optim.RMSprop(net.parameters(), lr=0.01, eps=0.0)"), (X, X + "    x[:, 0] = 0\n")),
        (("eps=0.0", "eps=1e-8"),),
    ),
    Fault(
        "nan-update",
        "an eps that float16 holds, as 1e-4",
        ((MADE, "torch.optim.RMSprop(net.half().parameters(), lr=0.001)"), (OUT, "out = net(x.half()).float()")),
        (("lr=0.001", "lr=0.001, eps=1e-4"),),
        "half",
    ),
    Fault("failed", "set the layer's in_features to 16", (("nn.Linear(16, 3)", "nn.Linear(12, 3)"),)),
    Fault("no-graph", "leave `detach` out there", ((OUT, "out = net(x).detach()"),)),
    Fault(
        "freed-graph",
        "detach what is carried over",
        (("# training", "carried = 0\n# training"), (LOSS, LOSS + " + 0.01 * carried\n    carried = out.mean()")),
        (("carried = out.mean()", "carried = out.mean().detach()"),),
    ),
    Fault(
        "overwritten",
        "(`x = x + 1` for `x += 1`)",
        ((OUT, "out = net(x).sigmoid()\n    out += 1"),),
        (("out += 1", "out = out + 1"),),
    ),
    Fault(
        "missing-gradient",
        "leave `detach` out there",
        ((MODULE, HIDDEN.format("x.detach()")), ("nn.ReLU()", "Hidden()")),
        (("x.detach()", "x.relu()"),),
    ),
    Fault(
        "missing-gradient",
        "use it in forward, or leave it out",
        ((NET, NET + "\nspare = net[0].spare = nn.Linear(3, 3)"),),
        kind="never called",
    ),
    Fault("not-optimized", "Optimizer(model.parameters())", (("SGD(net.parameters()", "SGD(net[0].parameters()"),)),
    Fault(
        "not-optimized",
        "or freeze them",
        (("SGD(net.parameters()", "SGD(net[0].parameters()"),),
        (("optimizer =", "net[2].requires_grad_(False)\noptimizer ="),),
        "frozen",
    ),
    Fault("missing-zero-grad", "optimizer.zero_grad() before loss.backward()", ((CLEAR, ""),)),
    Fault(
        "zero-grad-misplaced",
        "zero_grad before loss.backward()",
        ((CLEAR, ""), ("    optimizer.step()", "    optimizer.zero_grad()\n    optimizer.step()")),
    ),
    Fault(
        "zero-grad-misplaced",
        "or after optimizer.step()",
        ((CLEAR, ""), ("    optimizer.step()", "    optimizer.zero_grad()\n    optimizer.step()")),
        (("    optimizer.zero_grad()\n    optimizer.step()", "    optimizer.step()\n    optimizer.zero_grad()"),),
        "after",
    ),
    Fault("optimizer-never-steps", "with its parentheses", (("optimizer.step()", "optimizer.step"),)),
    Fault("backward-never-called", "with its parentheses", (("loss.backward()", "loss.backward"),)),
    Fault(
        "step-before-backward",
        "loss.backward() first, then optimizer.step()",
        ((UPDATE, "    optimizer.step()\n    loss.backward()\n"),),
    ),
    Fault(
        "step-too-seldom",
        "inside the loop",
        (("    optimizer.step()", "    if step % 10 == 9:\n        optimizer.step()"),),
        steps=80,
    ),
    Fault(
        "double-backward",
        "once for each loss",
        (("loss.backward()", "loss.backward(retain_graph=True)\n    loss.backward()"),),
    ),
    Fault("accumulation-not-divided", "divide the loss by the number of micro-batches", ((" / 4", ""),), base=MICRO),
    Fault(
        "clip-after-step",
        "between loss.backward() and optimizer.step()",
        (
            (
                "    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    optimizer.step()\n",
                "    optimizer.step()\n    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n",
            ),
        ),
        base=CLIPPED,
    ),
    Fault(
        "clip-before-backward",
        "between loss.backward() and optimizer.step()",
        (
            (
                "    loss.backward()\n    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n",
                "    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    loss.backward()\n",
            ),
        ),
        base=CLIPPED,
    ),
    Fault(
        "clip-before-unscale",
        "scaler.unscale_(optimizer) before clipping",
        (("    scaler.unscale_(optimizer)\n", ""),),
        base=SCALED,
    ),
    Fault(
        "clip-other-parameters",
        "list(model.parameters())",
        (("truth =", "weights = net.parameters()\ntruth ="), ("norm_(net.parameters()", "norm_(weights")),
        (("weights = net.parameters()", "weights = list(net.parameters())"),),
        base=CLIPPED,
    ),
    Fault(
        "lr-zero",
        "the schedule's length",
        (("optimizer, 30)", "optimizer, 1)"), ("step % 10 == 9", "step % 2 == 1")),
        base=SCHEDULED,
        steps=60,
    ),
    Fault(
        "scheduler-per-step",
        "once per epoch",
        (("if step % 10 == 9", "if True"), ("optimizer, 30)", "optimizer, 10)")),
        (("if True:", "if step % 10 == 9:"),),
        base=SCHEDULED,
        steps=60,
    ),
    Fault(
        "scheduler-before-step",
        "scheduler.step() after optimizer.step()",
        (
            ("    if step % 10 == 9:\n        scheduler.step()\n", ""),
            (CLEAR, "    if step % 10 == 0:\n        scheduler.step()\n" + CLEAR),
        ),
        base=SCHEDULED,
    ),
    Fault(
        "lr-jump",
        "a factor",
        (
            (
                "optimizer.zero_grad()",
                "optimizer.param_groups[0]['lr'] = 20.0 if step >= 40 else 0.1\n    optimizer.zero_grad()",
            ),
        ),
        steps=80,
    ),
    Fault(
        "optimizer-made-anew",
        "once, before the loop",
        ((CLEAR, "    optimizer = torch.optim.Adam(net.parameters())\n" + CLEAR),),
        (("    optimizer = torch.optim.Adam(net.parameters())\n", ""),),
    ),
    Fault(
        "optimizer-before-change",
        "after the model has its final parameters",
        (("truth =", "net[2] = nn.Linear(16, 3)\ntruth ="),),
        (("net[2] = nn.Linear(16, 3)\n", ""), ("optimizer =", "net[2] = nn.Linear(16, 3)\noptimizer =")),
    ),
    Fault("softmax-before-cross-entropy", "the logits", ((OUT, "out = net(x).softmax(1)"),)),
    Fault("activation-on-logits", "leave out the activation", ((OUT, "out = net(x).relu()"),)),
    Fault(
        "sigmoid-before-bce-with-logits",
        "give it the logits",
        ((LOSS, "F.binary_cross_entropy_with_logits(out.sigmoid(), F.one_hot(y, 3).float())"),),
        ((".sigmoid()", ""),),
    ),
    Fault(
        "sigmoid-before-bce-with-logits",
        "or use binary_cross_entropy",
        ((LOSS, "F.binary_cross_entropy_with_logits(out.sigmoid(), F.one_hot(y, 3).float())"),),
        (("cross_entropy_with_logits", "cross_entropy"),),
        "other",
    ),
    Fault(
        "nll-on-probabilities",
        "apply log_softmax before nll_loss",
        ((LOSS, "F.nll_loss(out.softmax(1), y)"),),
        ((".softmax(", ".log_softmax("),),
    ),
    Fault("nll-on-probabilities", "give the logits to cross_entropy", ((LOSS, "F.nll_loss(out, y)"),), kind="logits"),
    Fault(
        "bce-on-logits",
        "binary_cross_entropy_with_logits",
        (LINES, (LOSS, "F.binary_cross_entropy(out, F.one_hot(y, 3).float())")),
        (("cross_entropy(", "cross_entropy_with_logits("),),
    ),
    Fault(
        "bce-on-logits",
        "apply sigmoid first",
        (LINES, (LOSS, "F.binary_cross_entropy(out, F.one_hot(y, 3).float())")),
        (("(out,", "(out.sigmoid(),"),),
        "other",
    ),
    Fault(
        "dropout-misplaced",
        "before the last layer",
        (("nn.Linear(16, 3)", "nn.Linear(16, 3), nn.Dropout(0.5)"),),
        (("nn.Linear(16, 3), nn.Dropout(0.5)", "nn.Dropout(0.5), nn.Linear(16, 3)"),),
    ),
    Fault(
        "broadcast-loss",
        "output.squeeze(1)",
        (("truth[:, :1]", "truth[:, 0]"),),
        (("mse_loss(out,", "mse_loss(out.squeeze(1),"),),
        base=REGRESSION,
    ),
    Fault(
        "broadcast-loss",
        "target.unsqueeze(1)",
        (("truth[:, :1]", "truth[:, 0]"),),
        (("loss(out, y", "loss(out, y.unsqueeze(1)"),),
        "other",
        base=REGRESSION,
    ),
    Fault(
        "broadcast-loss",
        "target.squeeze(1)",
        ((OUT, "out = net(x).squeeze(1)"),),
        (("loss(out, y", "loss(out, y.squeeze(1)"),),
        "long target",
        base=REGRESSION,
    ),
    Fault(
        "wrong-dim",
        "dim=-1 for classes",
        ((LOSS, "F.nll_loss(out.log_softmax(0), y)"),),
        (("log_softmax(0)", "log_softmax(-1)"),),
    ),
    Fault(
        "wrong-dim",
        "batch_first=True",
        ((", batch_first=True", ""),),
        ((", 0.0)", ", 0.0, batch_first=True)"),),
        "sequence",
        base=ORDERED,
    ),
    Fault(
        "positions-shared",
        "torch.arange(x.size(1)).unsqueeze(0)",
        (("torch.arange(x.size(1))", "torch.arange(x.size(0)).unsqueeze(1)"),),
        (("torch.arange(x.size(0)).unsqueeze(1)", "torch.arange(x.size(1)).unsqueeze(0)"),),
        base=ORDERED,
    ),
    Fault(
        "result-dropped",
        "assign the result, x = x.clamp",
        ((OUT, OUT + "\n    out.clamp(-3, 3)"),),
        (("    out.clamp(", "    out = out.clamp("),),
    ),
    Fault(
        "reshape-mixes-batch",
        "use permute or transpose",
        (
            (X, "x = torch.randn(8, 32)\n"),
            (MODULE, HIDDEN.format("x.reshape(32, 8)")),
            ("nn.Linear(8, 16)", "Hidden(), nn.Linear(8, 16)"),
            ("(x @ ", "(x.T @ "),
        ),
        (("x.reshape(32, 8)", "x.T"),),
    ),
    Fault(
        "relu-on-output",
        "leave the last activation out",
        (("nn.Linear(16, 1)", "nn.Linear(16, 1), nn.ReLU()"),),
        base=REGRESSION,
    ),
    Fault("loss-wrong-sign", "take the minus away", ((LOSS, "-" + LOSS),)),
    Fault(
        "loss-wrong-sign",
        "add the one that a log-likelihood needs",
        ((LOSS, "out.log_softmax(1)[range(32), y].mean()"),),
        (("loss = ", "loss = -"),),
        "log-likelihood",
    ),
    Fault(
        "loss-reduction-sum",
        "reduction='mean'",
        (("loss(out, y)", "loss(out, y, reduction='sum')"),),
        (("'sum'", "'mean'"),),
        base=REGRESSION,
    ),
    Fault(
        "input-unscaled",
        "subtract their mean and divide by their standard deviation",
        ((X, X + "    x = 100 * x + 300\n"), ("y = x @", "y = (x - 300) / 100 @")),
        ((OUT, "out = net((x - 300) / 100)"),),
        base=REGRESSION,
    ),
    Fault(
        "input-drifts",
        "work on a copy",
        (
            ("# training", "data = torch.randn(32, 8)\nlabels = (data @ truth).argmax(1)\n# training"),
            (X, "x = data.div_(0.7)\n"),
            ("    y = (x @ truth).argmax(1)\n", "    y = labels\n"),
        ),
        (("data.div_(0.7)", "data.clone().div_(0.7)"),),
    ),
    Fault(
        "graph-grows",
        "detach what is carried over (hidden state, running loss)",
        (
            (NET, "nn.Linear(8, 3)"),
            ("# training", "running = 0\n# training"),
            (LOSS, LOSS + " + 0.01 * running\n    running = loss"),
            ("backward()", "backward(retain_graph=True)"),
        ),
        (("running = loss", "running = loss.detach()"),),
    ),
    Fault(
        "graph-leaks",
        "loss.item()",
        (
            ("# training", "losses = []\n# training"),
            ("    loss.backward()", "    losses.append(loss)\n    loss.backward()"),
        ),
        (("append(loss)", "append(loss.item())"),),
    ),
    Fault(
        "missing-nonlinearity",
        "an activation, such as ReLU, between the layers",
        ((NET, "nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))"),),
    ),
    Fault(
        "eval-mode-in-training",
        "model.train() before each epoch",
        ((OUT, "net.eval()\n    out = net(x)"), ("nn.ReLU()", "nn.Dropout(0.1), nn.ReLU()")),
        (("net.eval()", "net.train()"),),
    ),
    Fault(
        "train-mode-in-evaluation",
        "model.eval() before the evaluation, and model.train() after it",
        (
            (
                "    optimizer.step()",
                (
                    "    optimizer.step()\n    if step % 10 == 9:\n        with torch.no_grad():\n"
                    "            net(torch.randn(32, 8))"
                ),
            ),
            ("nn.ReLU()", "nn.Dropout(0.1), nn.ReLU()"),
        ),
        (
            (
                "            net(torch.randn(32, 8))",
                "            net.eval()\n            net(torch.randn(32, 8))\n            net.train()",
            ),
        ),
    ),
    Fault(
        "bad-init",
        "nn.init.kaiming_normal_",
        (("nn.init.kaiming_normal_(each.weight)", "nn.init.normal_(each.weight, 0, 3)"),),
        base=INITIALISED,
    ),
    Fault(
        "symmetric-init",
        "nn.init.kaiming_normal_",
        (("nn.init.kaiming_normal_(each.weight)", "nn.init.constant_(each.weight, 0.1)"),),
        base=INITIALISED,
    ),
    Fault(
        "exploding",
        "a norm after each layer",
        (("nn.init.kaiming_normal_(each.weight)", "nn.init.normal_(each.weight, 0, 3)"),),
        (("(nn.Linear(16, 16), nn.ReLU())", "(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), nn.ReLU())"),),
        base=INITIALISED,
    ),
    Fault(
        "learning-rate-too-high", "Divide the learning rate by 10", (("lr=0.1", "lr=20.0"),), (("lr=20.0", "lr=0.2"),)
    ),
    Fault(
        "learning-rate-too-low",
        "Multiply the learning rate by 100",
        (("lr=0.1, momentum=0.9", "lr=1e-7"),),
        (("lr=1e-7", "lr=1e-3"),),
    ),
    Fault(
        "hooks-scale",
        "leave the gradient as it is",
        (
            (
                OUT,
                (
                    "hidden = net[0](x)\n    hidden.register_hook(lambda gradient: gradient * 50)\n"
                    "    out = net[2](net[1](hidden))"
                ),
            ),
        ),
        (("    hidden.register_hook(lambda gradient: gradient * 50)\n", ""),),
    ),
    Fault(
        "dead-units",
        "Initialise the biases before it at 0",
        (("optimizer =", "net[0].bias.data.fill_(-30.0)\noptimizer ="),),
        (("(-30.0)", "(0.0)"),),
    ),
    Fault(
        "dead-units",
        "use LeakyReLU",
        (("optimizer =", "net[0].bias.data.fill_(-30.0)\noptimizer ="),),
        (("nn.ReLU()", "nn.LeakyReLU()"), ("lr=0.1", "lr=0.01")),
        "leaky",
    ),
    Fault(
        "dead-units",
        "use LeakyReLU",
        (("nn.ReLU()", "nn.GELU()"), ("optimizer =", "net[0].bias.data.fill_(-30.0)\noptimizer =")),
        (("nn.GELU()", "nn.LeakyReLU()"), ("lr=0.1", "lr=0.01")),
        "gelu",
    ),
    Fault(
        "saturated",
        "the weights to 1/fan_in",
        (("nn.ReLU()", "nn.Tanh()"), ("optimizer =", "nn.init.normal_(net[0].weight, 0, 100)\noptimizer =")),
        (("0, 100)", "0, 8**-0.5)"),),
    ),
    Fault(
        "weight-decay-dominates",
        "5e-4 with SGD",
        (("momentum=0.9", "momentum=0.9, weight_decay=0.5"),),
        (("=0.5", "=5e-4"),),
    ),
    Fault(
        "adam-epsilon",
        "Leave eps at 1e-8",
        ((MADE, "torch.optim.Adam(net.parameters(), lr=0.01, eps=10.0)"),),
        (("eps=10.0", "eps=1e-8"),),
    ),
    Fault("momentum", "Use 0.9", (("momentum=0.9", "momentum=0.9999"),)),
    Fault("clip-always-on", "near the usual norm of the gradient", (("(), 1.0)", "(), 1e-4)"),), base=CLIPPED),
    Fault(
        "underflow",
        "to float16 with torch.amp.GradScaler",
        ((NET, NET + ".half()"), (OUT, "out = net(x.half())"), (LOSS, LOSS + " * 1e-6")),
        (
            (".half()\n", "\n"),
            ("truth =", 'scaler = torch.amp.GradScaler("cpu")\ntruth ='),
            ("out = net(x.half())", 'with torch.autocast("cpu", torch.float16):\n        out = net(x)'),
            (UPDATE, "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"),
        ),
    ),
    Fault(
        "bf16-update-lost",
        "Keep the weights in float32",
        ((NET, NET + ".bfloat16()"), ("lr=0.1, momentum=0.9", "lr=1e-4"), (OUT, "out = net(x.bfloat16())")),
        ((".bfloat16()\n", "\n"), ("x.bfloat16()", "x"), ("lr=1e-4", "lr=1e-2")),
    ),
    Fault(
        "scaler-churn",
        "raise growth_interval",
        (
            ("init_scale=1024.0", "init_scale=1024.0, growth_interval=1"),
            (
                "    scaler.unscale_(optimizer)\n",
                (
                    "    if scaler.get_scale() > 2048:\n        net[0].weight.grad[0] = torch.inf\n"
                    "    scaler.unscale_(optimizer)\n"
                ),
            ),
        ),
        (("growth_interval=1)", "growth_interval=2000)"),),
        "grows",
        base=SCALED,
        steps=60,
    ),
    Fault(
        "scaler-churn",
        "leave its argument",
        (
            ("scaler.update()", "scaler.update(2.0**20)"),
            (
                "    scaler.unscale_(optimizer)\n",
                (
                    "    if scaler.get_scale() > 2048:\n        net[0].weight.grad[0] = torch.inf\n"
                    "    scaler.unscale_(optimizer)\n"
                ),
            ),
        ),
        (("2.0**20", ""),),
        "set",
        base=SCALED,
        steps=60,
    ),
    Fault(
        "scaler-churn",
        "compute it in float32",
        ((OUT, "out = (net(x).half() * 3e4).float() * 1e-4"),),
        (("net(x).half()", "net(x)"),),
        "overflows",
        base=SCALED,
        steps=60,
    ),
    Fault(
        "batch-norm", "a larger momentum, as torch's 0.1", (("Norm1d(16)", "Norm1d(16, momentum=1e-5)"),), base=NORMED
    ),
    Fault(
        "batch-norm",
        "a smaller momentum, as torch's 0.1",
        (("Norm1d(16)", "Norm1d(16, momentum=1.0)"),),
        kind="last",
        base=NORMED,
    ),
    Fault("batch-norm", "train with larger batches", (("randn(32", "randn(2"),), kind="few", base=NORMED),
    Fault(
        "batch-norm",
        "use GroupNorm or LayerNorm",
        (("randn(32", "randn(2"), ("lr=0.1, momentum=0.9", "lr=0.01")),
        (("nn.BatchNorm1d(16)", "nn.LayerNorm(16)"),),
        "layer norm",
        base=NORMED,
    ),
    Fault("diverged", "a tenth of the", (("lr=0.02", "lr=0.9"),), base=REGRESSION),
    Fault(
        "attention-collapse",
        "Divide the logits by √d",
        ((MODULE, HIDDEN.format("(1000 * x @ x.T).softmax(-1) @ x")), ("nn.ReLU()", "Hidden()")),
        (("1000 * x", "0.25 * x"),),
    ),
    Fault(
        "weights-untied",
        "head.weight = emb.weight",
        (("net[3].weight = net[0].weight", "net[3].weight.data = net[0].weight.data.clone()"),),
        base=WORDS,
    ),
    Fault(
        "shared-weights",
        "[make_layer() for _ in range(n)]",
        ((DEEP_LAYERS, "*[nn.Sequential(nn.Linear(16, 16), nn.ReLU())] * 6"),),
        base=DEEP,
    ),
    Fault(
        "vanishing",
        "Use ReLU or a similar function in place of sigmoid",
        ((DEEP_LAYERS, DEEP_LAYERS.replace("ReLU", "Sigmoid")),),
        base=DEEP,
    ),
    Fault(
        "not-updated",
        "what writes old values back",
        (
            ("# training", "kept = net[0].weight.detach().clone()\n# training"),
            ("    optimizer.step()", "    optimizer.step()\n    net[0].weight.data.copy_(kept)"),
        ),
        (("    net[0].weight.data.copy_(kept)\n", ""),),
    ),
    Fault(
        "saturated",
        "use ReLU",
        (("nn.ReLU()", "nn.Tanh()"), ("optimizer =", "nn.init.normal_(net[0].weight, 0, 100)\noptimizer =")),
        (("nn.Tanh()", "nn.ReLU()"), ("lr=0.1, momentum=0.9", "lr=1e-4")),
        "relu",
    ),
    Fault(
        "exploding",
        "weights of variance 2/fan_in",
        (("nn.init.kaiming_normal_(each.weight)", "nn.init.normal_(each.weight, 0, 3)"),),
        kind="variance",
        base=INITIALISED,
    ),
    Fault(
        "vanishing",
        "a norm",
        ((DEEP_LAYERS, DEEP_LAYERS.replace("ReLU", "Sigmoid")),),
        (("nn.Sigmoid()", "nn.Sequential(nn.Sigmoid(), nn.LayerNorm(16))"),),
        "norm",
        base=DEEP,
    ),
    Fault(
        "vanishing",
        "a residual path",
        ((DEEP_LAYERS, DEEP_LAYERS.replace("ReLU", "Sigmoid")),),
        ((MODULE, HIDDEN.format("x + x.sigmoid()")), ("nn.Sigmoid()", "Hidden()"), ("lr=0.1, momentum=0.9", "lr=0.01")),
        "residual",
        base=DEEP,
    ),
    Fault(
        "learning-rate-too-high",
        "warm it up",
        (("lr=0.1", "lr=20.0"),),
        (
            ("lr=20.0", "lr=2.0"),
            ("truth =", "warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1, 400)\ntruth ="),
            ("    optimizer.step()", "    optimizer.step()\n    warmup.step()"),
        ),
        "warm-up",
    ),
    Fault(
        "learning-rate-too-high",
        "divide the schedule's `max_lr` by 10",
        (
            ("truth =", "cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5.0, total_steps=50)\ntruth ="),
            ("    optimizer.step()", "    optimizer.step()\n    cycle.step()"),
        ),
        (("max_lr=5.0", "max_lr=0.5"),),
        "one cycle",
    ),
    Fault(
        "learning-rate-too-high",
        "divide the rate that it leads to by 10",
        (
            ("lr=0.1", "lr=5.0"),
            ("truth =", "warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1, 20)\ntruth ="),
            ("    optimizer.step()", "    optimizer.step()\n    warmup.step()"),
        ),
        (("lr=5.0", "lr=0.5"),),
        "warmed up",
    ),
    Fault(
        "dropout-misplaced",
        "lower p",
        (("nn.Linear(16, 3)", "nn.Dropout(0.95), nn.Linear(16, 3)"),),
        (("0.95", "0.2"),),
        "much",
    ),
    Fault(
        "loss-reduction-sum",
        "a learning rate that is smaller by the number of samples",
        (("loss(out, y)", "loss(out, y, reduction='sum')"),),
        (("lr=0.02", "lr=0.02 / 32"),),
        "rate",
        base=REGRESSION,
    ),
    Fault(
        "scheduler-per-step",
        "give it its lengths in updates",
        (("if step % 10 == 9", "if True"), ("optimizer, 30)", "optimizer, 10)")),
        (("optimizer, 10)", "optimizer, 300)"),),
        "lengths",
        base=SCHEDULED,
        steps=60,
    ),
    Fault(
        "relu-on-output",
        "bring the targets into its range",
        (("nn.Linear(16, 1)", "nn.Linear(16, 1), nn.ReLU()"),),
        (("y = x @ truth[:, :1]", "y = (x @ truth[:, :1]).relu()"),),
        "targets",
        base=REGRESSION,
    ),
    Fault(
        "freed-graph",
        "add the losses up and call backward once",
        (("    loss.backward()", "    loss.backward()\n    (loss * 0.1).backward()"),),
        (("    loss.backward()\n    (loss * 0.1).backward()", "    (loss + loss * 0.1).backward()"),),
        "twice",
    ),
    Fault(
        "freed-graph",
        "retain_graph=True",
        (("    loss.backward()", "    loss.backward()\n    (loss * 0.1).backward()"),),
        (("    loss.backward()\n", "    loss.backward(retain_graph=True)\n"),),
        "kept",
    ),
    Fault(
        "overwritten",
        "write into a clone",
        ((OUT, "out = net(x).sigmoid()\n    out += 1"),),
        (("    out += 1", "    out = out.clone()\n    out += 1"),),
        "clone",
    ),
    Fault(
        "overwritten",
        "return a new tensor (`return g * 0.1` for `g.mul_(0.1)`)",
        (
            (MODULE, MODULE + "def damp(g):\n    g.mul_(0.1)\n"),
            (OUT, "left = net(x)\n    right = net(x.square())\n    right.register_hook(damp)\n    out = left + right"),
        ),
        (("g.mul_(0.1)", "return g * 0.1"),),
        IN_A_HOOK,
    ),
    Fault(
        "momentum",
        "betas=(0.9, 0.999)",
        ((MADE, "torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.999, 0.9))"),),
        (("(0.999, 0.9)", "(0.9, 0.999)"),),
        "betas",
    ),
    Fault(
        "attention-collapse",
        "normalise queries and keys",
        ((MODULE, HIDDEN.format("(1000 * x @ x.T).softmax(-1) @ x")), ("nn.ReLU()", "Hidden()")),
        (("(1000 * x @ x.T)", "(F.normalize(x, dim=-1) @ F.normalize(x, dim=-1).T)"),),
        "normalised",
    ),
    Fault(
        "layers-in-a-list",
        "nn.Sequential",
        (
            (MODULE, LISTED),
            (NET, "Net()"),
            ("# training", "models = {'net': net, 'hidden': net.layers[0]}\n# training"),
        ),
        (("[nn.Linear(8, 16)]", "nn.Sequential(nn.Linear(8, 16))"), (", 'hidden': net.layers[0]", "")),
        "sequential",
    ),
    Fault(
        "bf16-update-lost",
        "compute under autocast",
        ((NET, NET + ".bfloat16()"), ("lr=0.1, momentum=0.9", "lr=1e-4"), (OUT, "out = net(x.bfloat16())")),
        (
            (".bfloat16()\n", "\n"),
            ("    out = net(x.bfloat16())", '    with torch.autocast("cpu", torch.bfloat16):\n        out = net(x)'),
        ),
        "autocast",
    ),
    Fault(
        "learning-rate-too-high",
        "Divide the learning rate by 10",
        (("lr=0.02", "lr=0.9"),),
        (("lr=0.9", "lr=0.09"),),
        "regression",
        base=REGRESSION,
    ),
    Fault(
        "dead-units",
        "Lower the learning rate",
        ((MADE, "torch.optim.Adam(net.parameters(), lr=1.0)"), (X, "x = torch.rand(32, 8)\n")),
        (("lr=1.0", "lr=0.01"),),
        "rate",
    ),
    Fault(
        "vanishing",
        "weights of variance 2/fan_in",
        (("nn.init.kaiming_normal_(each.weight)", "nn.init.normal_(each.weight, 0, 0.05)"),),
        kind="variance",
        base=INITIALISED,
    ),
    Fault(
        "not-updated",
        "Look at hooks of the optimizer",
        (
            ("truth =", "optimizer.register_step_pre_hook(lambda *_: [net[0].weight.grad.zero_(), None][1])\ntruth ="),
            ("lr=0.1, momentum=0.9", "lr=0.1"),
        ),
        (("optimizer.register_step_pre_hook(lambda *_: [net[0].weight.grad.zero_(), None][1])\n", ""),),
        "hook",
    ),
    Fault(
        "kinks",
        "a small ε under a root",
        ((LOSS, LOSS + " + 0.001 * (out * (step > 0)).sum(1).abs().sqrt().mean()"),),
        ((".abs().sqrt()", ".abs().add(1e-6).sqrt()"),),
    ),
    Fault(
        "layers-in-a-list",
        "nn.ModuleList",
        (
            (MODULE, LISTED),
            (NET, "Net()"),
            ("# training", "models = {'net': net, 'hidden': net.layers[0]}\n# training"),
        ),
        (("[nn.Linear(8, 16)]", "nn.ModuleList([nn.Linear(8, 16)])"), (", 'hidden': net.layers[0]", "")),
    ),
)
"""Each detector's, and of one that advises several things each of these."""

FAULTS += (
    Fault(
        "recomputed-otherwise",
        "write to it outside of the checkpointed part",
        (
            (
                MODULE,
                MODULE
                + """from torch.utils.checkpoint import checkpoint
class Picked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bias = nn.Linear(16, 16), torch.zeros(())
    def forward(self, x):
        rows = (x[:, 0] > self.bias).nonzero().flatten()
        self.bias.add_(0.2)
        return torch.zeros_like(x).index_add(0, rows, self.fc(x[rows]).relu())
class Saving(nn.Sequential):
    def forward(self, x):
        return self[2](checkpoint(self[1], self[0](x), use_reentrant=False))
""",
            ),
            (NET, "Saving(nn.Linear(8, 16), Picked(), nn.Linear(16, 3))"),
        ),
        (
            ("        self.bias.add_(0.2)\n", ""),
            ("    loss.backward()\n", "    loss.backward()\n    net[1].bias += 0.01\n"),
        ),
    ),
    Fault(
        "inference-tensor",
        "make it in torch.no_grad() instead of torch.inference_mode()",
        (
            ("truth =", "net[0].requires_grad_(False)\ntruth ="),
            (OUT, "with torch.inference_mode():\n        features = net[1](net[0](x))\n    out = net[2](features)"),
        ),
        (("torch.inference_mode()", "torch.no_grad()"),),
    ),
    Fault(
        "targets-shifted-twice",
        "leave `labels[:, 1:]` and `logits[:, :-1]` out where the loss shifts",
        (("logits.flatten(0, 1), tokens[:, 1:]", "logits[:, :-1].flatten(0, 1), tokens[:, 1:][:, 1:]"),),
        base=SEQUENCES,
    ),
    Fault(
        "targets-not-shifted",
        "`logits[:, :-1]` with `tokens[:, 1:]`",
        (("tokens[:, 1:]", "tokens[:, :-1]"),),
        base=SEQUENCES.replace("tokens[:, :-1]", "tokens[:, : len(tokens[0]) - 1]"),
    ),
    Fault("padding-in-loss", "pass ignore_index to the loss", ((", ignore_index=0", ""),), base=SEQUENCES),
    Fault(
        "mask-hides-nothing",
        "give multi_head_attention_forward the mask as it is, of dtype bool (True is hidden)",
        (("(tokens == 0)", "(tokens == 0).float()"),),
        base=ATTENDING,
    ),
    Fault(
        "broadcast-loss",
        "mask.squeeze(1)",
        (
            (LOSS, '(F.cross_entropy(out[:, None].mT, y[:, None], reduction="none") * mask).sum() / mask.sum()'),
            (X, X + "    mask = (x[:, :1] > -1).unsqueeze(1)\n"),
        ),
        (("mask).sum() /", "mask.squeeze(1)).sum() /"),),
        "mask",
    ),
    Fault("mask-inverted", "`key_padding_mask=(tokens == pad)`", (("(tokens == 0)", "(tokens != 0)"),), base=ATTENDING),
    Fault(
        "sorted-labels",
        "a permutation of the indices",
        (("torch.randperm(240)[:16]", "torch.arange(16 * step, 16 * step + 16) % 240"),),
        base=BASE.replace(
            "# training",
            "labels = torch.arange(240) // 16 % 3\ninputs = torch.randn(240, 8) + labels[:, None]\n# training",
        )
        .replace("x = torch.randn(32, 8)", "rows = torch.randperm(240)[:16]\n    x = inputs[rows]")
        .replace("(x @ truth).argmax(1)", "labels[rows]"),
    ),
    Fault(
        "output-ignores-input",
        "averaged, indexed or overwritten",
        (("return self[2](h)", "return self[2](h.mean(0, keepdim=True).expand_as(h))"),),
        base=BASE.replace(
            "net = nn.Sequential(",
            """class Net(nn.Sequential):
    def forward(self, x):
        h = self[1](self[0](x))
        return self[2](h)
net = Net(""",
        ),
    ),
    Fault(
        "representation-collapse",
        "negatives, a variance and covariance term",
        (("F.cross_entropy(-torch.cdist(one, two), torch.arange(32))", "(one - two).square().mean()"),),
        base=VIEWS,
    ),
    Fault(
        "evaluation-inputs",
        "apply the transform of the training data",
        (("net((raw - 50) / 20)", "net(raw)"),),
        base=BASE
        + "    with torch.no_grad():\n        raw = 50 + 20 * torch.randn(32, 8)\n        net((raw - 50) / 20)\n",
    ),
    Fault(
        "second-derivative",
        "save the arguments and compute it again in backward",
        (
            (
                MODULE,
                MODULE
                + """class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(square)
        return square * x
    @staticmethod
    def backward(ctx, gradient):
        (square,) = ctx.saved_tensors
        return 3 * square * gradient
class Cubed(nn.Module):
    def forward(self, x):
        return Cube.apply(x / 4)
""",
            ),
            (X, "x = torch.randn(32, 8, requires_grad=True)\n"),
            ("(x @ truth)", "(x.detach() @ truth)"),
            (NET, "nn.Sequential(nn.Linear(8, 16), Cubed(), nn.Linear(16, 3))"),
            (
                f"loss = {LOSS}",
                f"slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]\n    loss = {LOSS} + slope.norm()",
            ),
        ),
        (
            ("ctx.save_for_backward(square)", "ctx.save_for_backward(x)"),
            ("(square,) = ctx.saved_tensors", "(x,) = ctx.saved_tensors"),
            ("return 3 * square * gradient", "return 3 * x * x * gradient"),
        ),
    ),
)

BEGIN = "# training\n"
AVERAGED = """    for name, value in net.state_dict().items():
        average[name].lerp_(value, 0.2)
    if step % 10 == 9:
        trained = {name: value.clone() for name, value in net.state_dict().items()}
        net.load_state_dict(average)
        with torch.no_grad():
            print(net(x).mean())
"""
FIRST_SESSION = """import io
file = io.BytesIO()
for _ in range(20):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    F.cross_entropy(net(x), (x @ truth).argmax(1)).backward()
    optimizer.step()
torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 20}, file)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
"""

FAULTS += (
    Fault(
        "keys-not-loaded",
        "take the prefix off the keys",
        (
            ("truth =", 'given = {f"module.{key}": value + 0.1 for key, value in net.state_dict().items()}\ntruth ='),
            (BEGIN, BEGIN + "net.load_state_dict(given, strict=False)\n"),
        ),
        (("(given, ", '({key.removeprefix("module."): value for key, value in given.items()}, '),),
    ),
    Fault(
        "snapshot-not-copied",
        "keep a copy",
        (
            (
                UPDATE,
                UPDATE + "    if step == 20:\n        best = net.state_dict()\n"
                "    if step == 39:\n        net.load_state_dict(best)\n",
            ),
        ),
        (("best = net.state_dict()", "best = {name: value.clone() for name, value in net.state_dict().items()}"),),
    ),
    Fault(
        "averages-not-put-back",
        "keep a copy of the weights before, and load it after the evaluation",
        (
            (BEGIN, "average = {name: value.clone() for name, value in net.state_dict().items()}\n" + BEGIN),
            (UPDATE, UPDATE + AVERAGED),
        ),
        (("print(net(x).mean())\n", "print(net(x).mean())\n        net.load_state_dict(trained)\n"),),
    ),
    Fault(
        "resume-incomplete",
        "load the states of the optimizer",
        (
            (
                BEGIN,
                FIRST_SESSION + BEGIN + 'file.seek(0)\nsaved = torch.load(file)\nnet.load_state_dict(saved["net"])\n',
            ),
            ("for step in range(40)", 'for step in range(saved["step"], 60)'),
        ),
        (('(saved["net"])\n', '(saved["net"])\noptimizer.load_state_dict(saved["optimizer"])\n'),),
    ),
)

DECODER = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 16), nn.Linear(16, 12)
        self.register_buffer("later", torch.ones(9, 9, dtype=torch.bool).triu(1))
    def forward(self, ids):
        x = self.embed(ids)
        scores = (x @ x.transpose(1, 2) / 4).masked_fill(self.later, -torch.inf)
        return self.out(x + scores.softmax(-1) @ x)
net = Decoder()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
# training
for step in range(STEPS):
    ids = (torch.arange(10) + torch.randint(0, 12, (32, 1))) % 12
    optimizer.zero_grad()
    loss = F.cross_entropy(net(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    loss.backward()
    optimizer.step()
"""

FAULTS += (
    Fault(
        "own-backward",
        "multiply what backward returns by what the forward multiplies by",
        (
            (
                MODULE,
                MODULE
                + """class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
class Scaled(nn.Module):
    def forward(self, x):
        return Scale.apply(x, 2.0)
""",
            ),
            (NET, "nn.Sequential(nn.Linear(8, 16), Scaled(), nn.ReLU(), nn.Linear(16, 3))"),
        ),
        (("return gradient, None", "return gradient * ctx.factor, None"),),
    ),
    Fault(
        "samples-mix",
        "dim=-1 for softmax",
        (
            (
                MODULE,
                MODULE
                + """class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.out = nn.Linear(2, 4), nn.Linear(16, 3)
    def forward(self, x):
        key = self.key(x.view(-1, 4, 2))
        weights = (key @ key.transpose(1, 2)).flatten(0, 1).softmax(dim=0)
        return self.out((weights.view(-1, 4, 4) @ key).flatten(1))
""",
            ),
            (NET, "Attention()"),
        ),
        (("softmax(dim=0)", "softmax(dim=-1)"),),
    ),
    Fault(
        "future-seen",
        "use what masked_fill returns",
        (
            (
                "scores = (x @ x.transpose(1, 2) / 4).masked_fill(",
                "scores = x @ x.transpose(1, 2) / 4\n        scores.masked_fill(",
            ),
        ),
        (("        scores.masked_fill(", "        scores = scores.masked_fill("),),
        base=DECODER,
    ),
)

FAULTS += (
    Fault(
        "zero-gradient",
        "compute the loss of what is in front of it",
        ((OUT, "out = (net(x) - 9).clamp(0, 1)"),),
        (("(net(x) - 9).clamp(0, 1)", "net(x) - 9"),),
        "clamped",
    ),
    Fault(
        "zero-gradient",
        "as the last operation of a model, leave it out",
        ((OUT, "out = torch.relu(net(x) - 9)"),),
        (("torch.relu(net(x) - 9)", "net(x) - 9"),),
        "dead units",
    ),
    Fault(
        "zero-gradient",
        "pass the gradient straight through",
        ((OUT, "out = net(x).round()"),),
        (("out = net(x).round()", "out = net(x)\n    out = out + (out.round() - out).detach()"),),
        "step function",
    ),
    Fault(
        "zero-gradient",
        "make what it takes smaller",
        (("F.cross_entropy(out, y)", "-(1e3 * out + 1e5).sigmoid().gather(1, y[:, None]).mean()"),),
        (("(1e3 * out + 1e5)", "out"),),
        "saturated",
    ),
    Fault(
        "zero-gradient",
        "look at its mask",
        ((OUT, "out = torch.where(x[:, :1] > 99, net(x), 0.0)"),),
        (("x[:, :1] > 99", "x[:, :1] < 99"),),
        "not picked",
    ),
    Fault(
        "zero-gradient",
        "look at what it is multiplied with",
        (("F.cross_entropy(out, y)", "0.0 * F.cross_entropy(out, y)"),),
        (("0.0 * F.cross", "1.0 * F.cross"),),
        "zero factor",
    ),
    Fault(
        "zero-gradient",
        "without a graph",
        (
            (
                "F.cross_entropy(out, y)",
                "-(out.log_softmax(1) - out.log_softmax(1)).exp().gather(1, y[:, None]).mean()",
            ),
        ),
        (("(out.log_softmax(1) - out.log_softmax(1))", "(out.log_softmax(1) - out.log_softmax(1).detach())"),),
        "cancels",
    ),
    Fault(
        "zero-gradient",
        "take the hook away",
        ((OUT, "out = net(x)\n    out.register_hook(torch.zeros_like)"),),
        (("\n    out.register_hook(torch.zeros_like)", ""),),
        "hook",
    ),
)

NO_CHANGE_OF_CODE = {
    "bit-flipped": "memory, not code: see tests/core/recording/test_weight_changes.py",
    "embedding-unused": "what goes in is to be looked at",
    "loss-spike": "the batch of that step is to be looked at",
    "loss-flat": "it claims no cause",
    "unused-in-ddp": "a process group: see tests/explaining/findings/test_refused.py",
    "ranks-disagree": "several processes: see tests/explaining/findings/test_batch_norm_ranks_hooks.py",
}
"""Detectors whose remedy is not a change of code, with the reason."""

_QUANTIZED = """class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.codes, self.decode = nn.Linear(8, 4), nn.Embedding(16, 4), nn.Linear(4, 3)
    def forward(self, x):
        z = self.encode(x)
        code = self.codes(torch.cdist(z.detach(), self.codes.weight.detach()).argmin(1))
        through = z + (code - z).detach()
        return self.decode(through), F.mse_loss(through, z.detach())
net = Quantized()
"""
_Q = "F.smooth_l1_loss(out.gather(1, y[:, None]).squeeze(1), {target})"
_LATER = "x[:, 0] + 0.9 * net(x.flip(0)).max(1).values"
_LOG = "log_prob = F.log_softmax(out, 1).gather(1, y[:, None]).squeeze(1)\n    loss = -(log_prob * x[:, 0]).mean()"

FAULTS += (
    Fault(
        "term-without-effect",
        "leave `item` out there",
        ((LOSS, f"{LOSS} + 2 * out.square().mean().item()"),),
        ((".item()", ""),),
    ),
    Fault(
        "straight-through-loss",
        "mse_loss(codes, x.detach())",
        ((f"net = {NET}\n", _QUANTIZED), (OUT, "out, own = net(x)"), (LOSS, f"{LOSS} + own")),
        (("F.mse_loss(through, z.detach())", "F.mse_loss(code, z.detach())"),),
    ),
    Fault(
        "td-target-gradient",
        "compute the target under torch.no_grad()",
        ((LOSS, _Q.format(target=_LATER)),),
        (
            (
                f"loss = {_Q.format(target=_LATER)}",
                f"with torch.no_grad():\n        target = {_LATER}\n    loss = {_Q.format(target='target')}",
            ),
        ),
    ),
    Fault(
        "summed-before-mask",
        "sum over the last dimension alone, sum(-1)",
        ((LOSS, '(F.cross_entropy(out, y, reduction="none") + 0.001 * out.square().sum()).mean()'),),
        ((".square().sum()", ".square().sum(-1)"),),
    ),
    Fault(
        "summed-beside-mean",
        "term.sum(dim=1).mean()",
        ((LOSS, LOSS + " + 0.2 * out.square().sum()"),),
        ((".square().sum()", ".square().sum(dim=1).mean()"),),
    ),
    Fault(
        "log-prob-as-entropy",
        "subtract the entropy itself",
        ((f"loss = {LOSS}", f"{_LOG} - 0.05 * log_prob.mean()"),),
        (("0.05 * log_prob.mean()", "0.05 * -(out.softmax(1) * out.log_softmax(1)).sum(1).mean()"),),
    ),
)
