from collections.abc import Sequence

from retrograd.findings.record import Record
from retrograd.history.fact import Fact
from retrograd.history.facts import GraphSize, Input, Parameter
from retrograd.history.sink import Moment
from tests.findings.by_hand import ask, make_record, spread
from tests.findings.programs import make_calls, make_chain, make_program

LOOKS = (0, 1, 2, 4, 8, 16, 32)


def _sizes(nodes: Sequence[float], alive: Sequence[int] = (0,) * 7, also: Sequence[Fact] = ()) -> Record:
    facts = [
        GraphSize(value=value, alive=held, moment=Moment(step))
        for step, value, held in zip(LOOKS, nodes, alive, strict=True)
    ]
    calls = make_calls([("forward", "backward", "step")] * 33)
    return make_record(range(33), lambda step: {"0:weight.grad": spread(1.0)}, facts=[*facts, *calls, *also])


def _carry(module: str, *given: Fact) -> Record:
    """A graph that grows, as the state of size [1, 4, 8] is handed on."""
    lstm = ("lstm", (-1, -2, -1), ((2, 4, 3), (1, 4, 8), (32, 3)), (2, 4, 8), "", module)
    chain = make_chain(lstm, ("mean", (0,), ((2, 4, 8),), ()), outputs=[0], step=1)
    return _sizes([9.0 + 5 * step for step in LOOKS], also=[chain, *given])


def test_what_a_growing_graph_carries_over() -> None:
    [found] = ask("graph-grows", _carry("rnn"))
    assert found.message.endswith("without detach: `lstm` (train.py:30) takes float32[1, 4, 8] that was made before "
                                  "this forward")  # fmt: skip
    assert found.line == "train.py:30"
    state = Input(name="self:input.state", dtype="float32", shape=(1, 4, 8), moment=Moment(1))
    assert [each.line for each in ask("graph-grows", _carry("rnn", state))] == ["train.py:11"]
    cell = ("rnn_tanh_cell", (-1, -2, -1), ((4, 3), (4, 8), (8, 3)), (4, 8), "", "cell")
    returned = make_chain(cell, ("mean", (0,), ((4, 8),), ()), outputs=[0], step=1)
    grown = _sizes([9.0 + 5 * step for step in LOOKS], also=[returned])
    assert [each.line for each in ask("graph-grows", grown)] == ["train.py:11"]


def test_a_graph_that_grows_with_the_step() -> None:
    [found] = ask("graph-grows", _sizes([9.0 + 5 * step for step in LOOKS]))
    assert (found.severity, found.line) == ("critical", "train.py:12")
    assert "grows by 5 nodes a step: backward ran through 9 nodes at step 0 and 169 at step 32" in found.message


def test_graphs_of_different_sizes() -> None:
    assert not ask("graph-grows", _sizes([9.0] * 7))
    assert not ask("graph-grows", _sizes([9.0, 40.0, 12.0, 33.0, 21.0, 50.0, 30.0]))
    assert not ask("graph-grows", _sizes([10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]))
    assert not ask("graph-grows", _sizes([5.0, 6.0, 20.0, 21.0, 22.0, 23.0, 24.0]))


def test_graphs_that_are_kept() -> None:
    [found] = ask("graph-leaks", _sizes([9.0] * 7, LOOKS))
    assert (found.severity, found.step) == ("warning", 1)
    assert "32 graphs of earlier steps are still held at step 32" in found.message
    assert found.line == "train.py:12"


def test_the_loss_whose_graphs_are_kept() -> None:
    loss = make_chain(("linear", (-1,), ((4, 3),), (4, 1), "", "0"), ("mean", (0,), ((4, 1),), ()), outputs=[0])
    [found] = ask("graph-leaks", _sizes([9.0] * 7, LOOKS, [loss]))
    assert (found.line, found.message.endswith("; the loss is made in train.py:31")) == ("train.py:31", True)
    inner = make_chain(("mean", (-1,), ((4, 1),), (), "", "0"), outputs=[0])
    assert [each.line for each in ask("graph-leaks", _sizes([9.0] * 7, LOOKS, [inner]))] == ["train.py:12"]


def test_graphs_that_are_kept_for_an_epoch() -> None:
    [found] = ask("graph-leaks", _sizes([9.0] * 7, [0, 1, 2, 4, 8, 16, 2]))
    assert (found.step, found.last_step) == (1, 16)
    assert (
        "16 graphs of earlier steps are still held at step 16, so memory grows with every step until" in found.message
    )
    assert not ask("graph-leaks", _sizes([9.0] * 7, [0, 1, 2, 4, 4, 4, 2]))
    assert not ask("graph-leaks", _sizes([9.0] * 7, [0, 1, 2, 4, 8, 8, 8]))  # a fixed number
    assert not ask("graph-leaks", _sizes([9.0] * 7, [0, 0, 2, 4, 8, 16, 2]))


def _passes(*nodes: float, lines: int = 1) -> Record:
    """Steps of as many passes, whose graphs have these numbers of nodes."""
    facts = [GraphSize(value=n, moment=Moment(step, micro)) for step in range(3) for micro, n in enumerate(nodes)]
    names = ("forward", *["backward", "second backward"][:lines] * len(nodes), "step")
    return make_program([*facts, *make_calls([names] * 3)])


def test_a_graph_that_grows_within_a_step() -> None:
    [found] = ask("graph-grows", _passes(20, 28, 36, 44, 52, 60, 68))
    assert (
        "grows by 8 nodes a pass: backward ran through 20 nodes in pass 0 of step 0 and 68 in pass 6" in found.message
    )
    assert not ask("graph-grows", _passes(20, 28, 36, 44, 52, 60, 68, lines=2))  # several losses
    assert not ask("graph-grows", _passes(20, 20, 20, 20, 20))
    assert not ask("graph-grows", _passes(20, 70))


def test_a_few_graphs_that_are_kept() -> None:
    assert not ask("graph-leaks", _sizes([9.0] * 7))
    assert not ask("graph-leaks", _sizes([9.0] * 7, [0, 1, 2, 4, 5, 5, 5]))
    assert not ask("graph-leaks", _sizes([9.0] * 7, [0, 1, 2, 4, 8, 9, 10]))


def _tied(first: Sequence[str], second: Sequence[str], kind: str = "Embedding", tied: tuple[str, ...] = ()) -> Record:
    facts = [
        Parameter(name=name, digest=digest, shape=(50, 16), tied=tied, moment=Moment(step))
        for name, digests in (("emb:weight", first), ("head:weight", second))
        for step, digest in enumerate(digests)
    ]
    return make_program(facts, modules={"self": "LM", "emb": kind, "head": "Linear"})


def test_copies_that_were_meant_to_be_tied() -> None:
    [found] = ask("weights-untied", _tied(["a", "b"], ["a", "c"]))
    assert (found.site, found.step, found.line) == ("head:weight", 1, "train.py:2")


def test_weights_that_are_tied_or_never_were() -> None:
    assert not ask("weights-untied", _tied(["a", "b"], ["a", "b"]))
    assert not ask("weights-untied", _tied(["a", "b"], ["x", "y"]))
    assert not ask("weights-untied", _tied(["a", "b"], ["a", "c"], kind="Linear"))


def _places(*paths: str, calls: int, kind: str = "Sequential") -> Record:
    layer = ("linear", (-1, -1), ((8, 8), (8, 8)), (8, 8), "", "0")
    chain = make_chain(*[layer] * calls, ("mean", (calls - 1,), ((8, 8),), ()), outputs=[calls - 1])
    return make_program([chain], modules={"self": kind} | dict.fromkeys(paths, "Linear"))


def test_one_module_at_several_places() -> None:
    [found] = ask("shared-weights", _places("0", "3", calls=3))
    assert (found.severity, found.site, found.line) == ("warning", "0", "train.py:0")
    assert "The module 0 stands at 3 places of a Sequential" in found.message


def test_one_module_alone_in_a_list() -> None:
    [found] = ask("shared-weights", _places("0", calls=3, kind="ModuleList"))
    assert "stands at 3 places of a ModuleList" in found.message
    assert not ask("shared-weights", _places("0", calls=1, kind="ModuleList"))


def test_modules_that_are_called_several_times_on_purpose() -> None:
    assert not ask("shared-weights", _places("0", "1", "2", calls=3))
    assert not ask("shared-weights", _places("0", "3", calls=1))  # others were taken out
    assert not ask("shared-weights", _places("0", "3", calls=3, kind="Net"))


def _died(
    message: str,
    modules: dict[str, str] | None = None,
    kind: str = "RuntimeError",
    looks: Sequence[Fact] = (),
    **fields: object,
) -> Record:
    error = {"kind": kind, "message": message, "lines": ["/home/me/train.py:7 in main", "/home/me/net.py:9 in forward"]}
    return make_program(looks, modules=modules, error=error | fields)


def test_a_run_that_died() -> None:
    message = "mat1 and mat2 shapes cannot be multiplied (64x144 and 256x6)"
    [found] = ask("failed", _died(message, {"fc2": "Linear"}, module="fc2"))
    assert (found.severity, found.site, found.line) == ("critical", "fc2", "/home/me/net.py:9")
    assert "in fc2: a layer that takes 256 features is given 144" in found.message
    assert message in found.message
    assert "in_features to 144" in found.repair


def test_shapes_that_are_no_layer_s() -> None:
    """What a hook, a backward or a forward of the program's own multiplies is not said to be a layer's."""
    message = "mat1 and mat2 shapes cannot be multiplied (16x3 and 6x3)"
    weight = Parameter(name="fc2:weight", shape=(8, 6), value=0.1, moment=Moment(0))
    linear = {"fc2": "Linear"}
    for record in (
        _died(message, in_backward=True, node="PickFirstBackward"),
        _died(message, linear, in_backward=True, module="fc2"),
        _died(message, {"self": "Net"}, module="self"),
        _died(message, linear, looks=[weight], module="fc2"),  # its own product would be with a matrix of 6 × 8
    ):
        [found] = ask("failed", record)
        assert "a matrix of 16 × 3 is multiplied with one of 6 × 3" in found.message
        assert "in_features" not in found.repair
    assert (
        ", in the backward of PickFirst: "
        in ask("failed", _died(message, in_backward=True, node="PickFirstBackward"))[0].message
    )
    channels = "Given groups=1, expected input[2, 3, 8, 8] to have 4 channels, but got 3 channels instead"
    assert "in_channels" in ask("failed", _died(channels))[0].repair
    assert "in_channels" not in ask("failed", _died(channels, in_backward=True, node="UpBackward"))[0].repair
    message = "Function PickBackward returned an invalid gradient at index 1 - got [6, 16] but "
    message += "expected shape compatible with [16, 6]"
    [found] = ask("failed", _died(message, in_backward=True, node="PickBackward"))
    assert "for input 1, of shape [16, 6], a gradient of shape [6, 16] is returned" in found.message


def test_a_run_that_died_of_something_of_its_own() -> None:
    [found] = ask("failed", _died("no such file", kind="FileNotFoundError"))
    assert found.message == "The run died: FileNotFoundError: no such file"
    [found] = ask("failed", _died("Target 5 is out of bounds.", kind="IndexError", in_backward=True))
    assert "in backward: target 5 is not a class of the model" in found.message


def test_runs_that_did_not_die() -> None:
    assert not ask("failed", make_program([]))
    assert not ask("failed", _died("", kind="KeyboardInterrupt"))
