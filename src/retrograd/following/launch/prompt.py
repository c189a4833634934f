"""``retrograd debug`` in one process: a prompt that opens where a backward pass stops. Loaded by the bootstrap.

It speaks on stderr: stdout belongs to the script.
"""

from __future__ import annotations

import atexit
import cmd
import os
import re
import sys
from collections.abc import Iterable
from typing import IO, Any, TextIO

import torch

from retrograd.core.errors import PatternError, RetrogradError
from retrograd.core.notices import print_text, say
from retrograd.following.launch.debugger import NON_FINITE, STEP, DebuggedPass, Debugger, Orders
from retrograd.following.launch.prompt_text import (
    complete_expression,
    complete_words,
    describe_gradient,
    describe_gradients,
    describe_nodes,
    describe_pass,
    describe_place,
    describe_source,
    describe_value,
    list_breakpoints,
    list_places,
)
from retrograd.following.launch.requests import DebugRequest
from retrograd.following.stepping.breakpoints import FORMS, Change, Stop, parse_breakpoint

_PROMPT = "(retrograd) "
_AROUND = 5
"""Nodes to list before and after the one where the pass is."""

_HELP = (
    ("where, w", "the node, the module call and source line that made it, its gradients, and the loss"),
    ("up, u [N]", "look at the node that gives incoming gradients to this one; of several, the N-th"),
    ("down, d [N]", "look at the node that gets an outgoing gradient of this one; of several, the N-th"),
    ("list, l", "nodes that ran last, where the pass is, and what comes next"),
    ("nodes [PATTERN]", "nodes that a pattern matches, as in: nodes blocks.3*"),
    ("info", "shape, range, norm and non-finite elements of gradients and saved tensors"),
    ("p EXPRESSION", "print node, incoming, outgoing, saved, graph, or anything of the script's"),
    ("set incoming[I] = EXPRESSION", "let the node get another gradient; or: set outgoing[I] = EXPRESSION"),
    ("step, s [N]", "run this node, or N nodes, and stop before the next"),
    ("next, n, continue, c", "go on to the next breakpoint, non-finite gradient, or exception"),
    ("until, t BREAKPOINT", "go on to the next node that it matches, as in: until blocks.3*"),
    (
        "break, b BREAKPOINT",
        "stop wherever it matches: non-finite | norm > 100 | kind MulBackward0 | line a.py:3 | blocks.3*",
    ),
    ("breaks", "all breakpoints, by number"),
    ("clear N", "take breakpoint N away"),
    ("finish", "let the script run on, and never stop it again; so does the end of input"),
    ("quit, q, exit", "end the script, with exit code 1"),
)
"""Commands, with their short forms, and what they do."""

_SET = re.compile(r"(incoming|outgoing)\s*\[\s*(\d+)\s*\]\s*=\s*(.+)")


def start_debugging_session() -> None:
    """Debug this process as ``retrograd debug`` was asked to; of several ranks, the first."""
    if int(os.environ.get("RANK", "0")):
        return
    request = DebugRequest.read(os.environ)
    texts = [*request.breakpoints, *([NON_FINITE] if request.nonfinite else [])]
    try:
        breakpoints = [parse_breakpoint(text) for text in dict.fromkeys(texts)]
    except PatternError as error:
        say(str(error))
        raise SystemExit(2) from None
    debugger = Debugger(breakpoints, TerminalPrompt().ask)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=debugger.orders.never_stop)  # it shares the terminal with its parent
    atexit.register(debugger.say_end)
    debugger.start()


class TerminalPrompt:
    """A prompt at the terminal, with line editing, where there is one; else it reads lines from stdin."""

    def __init__(self) -> None:
        self._last_command = ""

    def ask(self, stopped: DebuggedPass, orders: Orders) -> None:
        """Prompt for what to do; returns when the pass is to go on.

        Raises:
            SystemExit: the user has had enough.
        """
        output = sys.__stderr__
        if output is None:
            orders.stops = False
            return
        is_terminal = _is_terminal(sys.__stdin__) and _is_terminal(sys.__stdout__)
        prompt = Prompt(stopped, orders, sys.__stdin__, output, is_terminal=is_terminal)
        prompt.lastcmd = self._last_command
        streams = sys.stdin, sys.stdout
        if is_terminal:
            sys.stdin, sys.stdout = sys.__stdin__, sys.__stdout__  # readline works with these alone
        try:
            prompt.run()
        finally:
            sys.stdin, sys.stdout = streams
            self._last_command = prompt.lastcmd


class Prompt(cmd.Cmd):
    """Commands about one stop.

    Args:
        stopped: the pass, and where it is.
        orders: where it stops next.
        source: where commands come from; None for nowhere.
        output: where we speak.
        is_terminal: whether a person types, with line editing.
    """

    prompt = _PROMPT

    def __init__(
        self, stopped: DebuggedPass, orders: Orders, source: TextIO | None, output: TextIO, *, is_terminal: bool = False
    ) -> None:
        super().__init__(stdin=source, stdout=output)
        self.use_rawinput = is_terminal
        self._has_source = source is not None
        self._has_ended = False
        self._pass = stopped
        self._orders = orders
        self._selected = stopped.stop.index

    def run(self) -> None:
        """Print where the pass is, and carry out commands until one lets it go on."""
        self._say()
        self._say_all(describe_pass(self._pass, brief=self._pass.why == STEP))
        if not self._has_source:
            self.do_EOF("")
            return
        while not self._has_ended:
            try:
                self.cmdloop()
            except KeyboardInterrupt:
                self._say()
            except (OSError, ValueError):  # stdin is closed
                self.do_EOF("")

    # ---- where one is

    def do_where(self, text: str) -> None:
        """The node, the module call and the source line that made it, the loss, and where backward() was called."""
        self._selected = self._pass.stop.index
        self._say_all(describe_pass(self._pass))

    do_w = do_where

    def do_up(self, text: str) -> None:
        """Show the node that this one has its incoming gradient from, towards the loss; of several, the N-th."""
        graph, here = self._pass.graph, self._selected
        before = [
            (node.index, f"gives incoming[{edge.slot}]")
            for node in graph
            for edge in node.edges
            if edge is not None and edge.node == here
        ]
        self._move(before, text, "The pass begins here: no node gives it a gradient.")

    do_u = do_up

    def do_down(self, text: str) -> None:
        """Show the node that gets the outgoing gradient of this one, towards the leaves; of several, the N-th."""
        edges = enumerate(self._pass.graph[self._selected].edges)
        after = [(edge.node, f"gets outgoing[{slot}]") for slot, edge in edges if edge is not None]
        self._move(after, text, "Nothing goes out of here.")

    do_d = do_down

    def do_list(self, text: str) -> None:
        """The nodes that ran last, the one where the pass is, and those that come next."""
        stopped, graph = self._pass, self._pass.graph
        here = stopped.stop.index
        ran = [index for index in stopped.ran if index != here]
        done = {*ran, here}
        coming = [index for index in graph.order() if index not in done] if stopped.error is None else []
        self._say_all(describe_nodes(stopped, [*ran[-_AROUND:], here, *coming[:_AROUND]]))

    do_l = do_list

    def do_nodes(self, text: str) -> None:
        """The nodes that a pattern matches, as in: nodes blocks.3*"""
        graph = self._pass.graph
        point = parse_breakpoint(text or "*")
        if point.asks_place is None:
            self._say(f"{point} is a question about gradients, not about nodes; try: nodes blocks.3*")
            return
        point.within(graph)
        self._say_all(describe_nodes(self._pass, [node.index for node in graph if point.asks_place(node)]))

    # ---- what is there

    def do_p(self, text: str) -> None:
        """Evaluate an expression, with all names that are known where the script called ``backward()``."""
        self._say(describe_value(self._evaluate(text)))

    def do_info(self, text: str) -> None:
        """Shape, range, norm and non-finite elements of what comes in, of what goes out and of what is saved."""
        stop = self._pass.stop
        if self._selected != stop.index:
            self._say("Gradients are known where the pass is; go back there with: where")
            return
        self._say_all(describe_gradients(stop))
        for name, value in self._saved().items():
            self._say(f"  saved {name:<12} {describe_value(value, short=True)}")

    # ---- what to change

    def do_set(self, text: str) -> None:
        """Let the node get this gradient instead. Or: set outgoing[I] = EXPRESSION, for what goes on from it."""
        match = _SET.fullmatch(text.strip())
        if match is None:
            self._say("Write: set incoming[0] = EXPRESSION, or set outgoing[0] = EXPRESSION")
            return
        if self._is_over():
            return
        which, slot, stop = match[1], int(match[2]), self._pass.stop
        node = self._pass.graph[stop.index]
        count = len(stop.incoming) if which == "incoming" else len(node.edges)
        if slot >= count:
            self._say(f"There is no {which}[{slot}]: {node.place} has {count}.")
            return
        value = self._evaluate(match[3])
        old: tuple[Change, ...] = (stop.changes if which == "outgoing" else None) or (...,) * count
        changes = (*old[:slot], value, *old[slot + 1 :])
        if which == "incoming":
            stop.set_incoming(*changes)
        else:
            stop.set_outgoing(*changes)
        self._say(f"  {which}[{slot}] {describe_gradient(value)}")

    # ---- how to go on

    def do_step(self, text: str) -> bool:
        """Run this node, or N nodes, and stop before the next one."""
        count = int(text) if text.isdecimal() else 1
        if self._is_over() or count < 1:
            return False
        self._orders.steps = count
        return True

    do_s = do_step

    def do_next(self, text: str) -> bool:
        """Go on to the next breakpoint, the next gradient that is not finite, or the next exception."""
        return True

    do_continue = do_c = do_n = do_next

    def do_until(self, text: str) -> bool:
        """Go on to the next node that it matches, as in: until blocks.3*"""
        point = parse_breakpoint(text)
        if self._is_over():
            return False
        point.within(self._pass.graph)
        self._orders.wait_for(point)
        return True

    do_t = do_until

    def do_break(self, text: str) -> None:
        """Stop wherever it matches."""
        if not text:
            self.do_breaks("")
            self._say(f"Set one with: break {' | '.join(FORMS)}")
            return
        point = parse_breakpoint(text)
        number = self._orders.add(point)
        self._say(f"breakpoint {number}: {point}")
        if point.asks_place is not None:
            try:
                point.within(self._pass.graph)
            except RetrogradError as error:
                self._say(f"It matches no node of this pass. {error.repair.capitalize()}")

    do_b = do_break

    def do_breaks(self, text: str) -> None:
        """All breakpoints, by number."""
        for number, point in self._orders.breakpoints.items():
            self._say(f"  {number}  {point}")
        if not self._orders.breakpoints:
            self._say("There are no breakpoints.")

    def do_clear(self, text: str) -> None:
        """Take breakpoint N away."""
        point = self._orders.clear(int(text)) if text.isdecimal() else None
        self._say(f"cleared {point}" if point is not None else "There is no such breakpoint; see: breaks")

    def do_finish(self, text: str) -> bool:
        """Let the script run on, and never stop it again."""
        self._orders.stops = False
        return True

    def do_EOF(self, text: str) -> bool:  # noqa: N802 # the name that the standard library calls
        """End of input: let the script run on, and never stop it again."""
        if self.use_rawinput:
            self._say()
        self._has_ended = True
        return self.do_finish("")

    def do_quit(self, text: str) -> bool:
        """End the script, as sys.exit(1) does."""
        self._orders.stops = False
        raise SystemExit(1)

    do_q = do_exit = do_quit

    # ---- how commands are read

    def precmd(self, line: str) -> str:
        """Show what was read, where nobody has typed it."""
        if not _is_terminal(self.stdin):
            self._say(line.rstrip() if line != "EOF" else "")
        return line.strip()

    def onecmd(self, line: str) -> bool:
        """Carry out a command; what goes wrong is said, and is no reason to leave."""
        try:
            return bool(super().onecmd(line))
        except RetrogradError as error:
            self._say(str(error))
        except Exception as error:  # of an expression that the user typed
            self._say(f"{type(error).__name__}: {error}")
        return False

    def postloop(self) -> None:
        """A command has let the pass go on."""
        self._has_ended = True

    def emptyline(self) -> bool:
        """Step again, if that was the last command."""
        word = self.lastcmd.partition(" ")[0]
        return self.onecmd(self.lastcmd) if word in ("step", "s", "up", "u", "down", "d", "next") else False

    def default(self, line: str) -> None:
        """No such command."""
        self._say(f"There is no command {line.split(maxsplit=1)[0]!r}; see: help. To evaluate an expression: p {line}")

    def do_help(self, arg: str) -> None:
        """All commands, or one."""
        asked = [entry for entry in _HELP if arg in _names_of(entry[0])] or _HELP
        width = max(len(usage) for usage, _ in asked)
        for usage, does in asked:
            self._say(f"  {usage:<{width}}  {does}")

    do_h = do_help

    def completenames(self, text: str, *ignored: Any) -> list[str]:
        """Commands that begin so."""
        return [name for usage, _ in _HELP for name in _names_of(usage)[:1] if name.startswith(text)]

    def complete_break(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """Forms of breakpoints, and places."""
        graph = self._pass.graph
        return complete_words(text, line, begin, [*list_breakpoints(graph), *list_places(graph)])

    complete_b = complete_until = complete_break

    def complete_nodes(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """Places."""
        return complete_words(text, line, begin, list_places(self._pass.graph))

    def complete_p(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """Names that can be evaluated, and their attributes."""
        return complete_expression(text, line[:end], self._names())

    complete_set = complete_p

    # ---- inside

    def _say(self, text: str = "") -> None:
        print_text(text, file=self.stdout, flush=True)

    def _say_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._say(line)

    def _move(self, choices: list[tuple[int, str]], text: str, nothing: str) -> None:
        if not choices:
            self._say(nothing)
            return
        chosen = int(text) if text.isdecimal() else 1
        if not 1 <= chosen <= len(choices):
            self._say(f"There are {len(choices)}.")
            return
        for number, (index, what) in enumerate(choices, 1):
            if len(choices) > 1:
                mark = "->" if number == chosen else "  "
                self._say(f"{mark} {number}  {what}: {describe_place(self._pass.graph[index])}")
        self._selected = choices[chosen - 1][0]
        node = self._pass.graph[self._selected]
        if len(choices) == 1:
            self._say(f"{choices[0][1]}: {describe_place(node)}")
        self._say_all(f"  {line}" for line in describe_source(node))

    def _is_over(self) -> bool:
        if self._pass.error is not None:
            self._say("The pass has ended in the exception; continue lets the script see it.")
        return self._pass.error is not None

    def _saved(self) -> dict[str, Any]:
        stop = self._pass.stop
        if self._selected == stop.index:
            return stop.saved
        return Stop(self._pass, self._selected, 0, ()).saved

    def _names(self) -> dict[str, Any]:
        stopped, stop = self._pass, self._pass.stop
        frame = stopped.frame
        names = {**frame.f_globals, **frame.f_locals} if frame is not None else {}
        if stopped.raised_in is not None:
            names |= stopped.raised_in[0].f_locals
        here = self._selected == stop.index
        return {
            "torch": torch,
            **names,
            "node": stopped.graph[self._selected],
            "incoming": stop.incoming if here else None,
            "outgoing": stop.outgoing if here else None,
            "saved": self._saved(),
            "graph": stopped.graph,
        }

    def _evaluate(self, text: str) -> Any:
        with torch.no_grad():
            return eval(text.strip(), self._names())  # noqa: S307 # what the user types at a debugger


def _names_of(usage: str) -> list[str]:
    """As in ``"up, u [N]"`` → ``["up", "u"]``."""
    return re.match(r"\w+(, \w+)*", usage)[0].split(", ")  # type: ignore[index]


def _is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
