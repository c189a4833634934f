"""Every error that retrograd raises, in one tree.

    RetrogradError
    ├── SiteError
    │   ├── SiteSyntaxError        site-syntax
    │   ├── NoSuchSiteError        no-such-site
    │   ├── NoSuchStepError        no-such-step
    │   ├── NothingKeptError       nothing-kept
    │   └── PatternError           bad-pattern
    ├── RecordingError
    │   ├── ScheduleError          bad-schedule
    │   ├── StatisticError         bad-statistic
    │   ├── TensorPolicyError      bad-tensor-policy
    │   ├── ScalarError            not-a-scalar
    │   └── AttachError            cannot-attach
    ├── RunError
    │   ├── RunExistsError         run-exists
    │   ├── NotARunError           not-a-run
    │   ├── NothingRecordedError   nothing-recorded
    │   ├── DamagedRunError        damaged-run
    │   ├── RunWriteError          run-not-writable
    │   ├── RunUnreachableError    run-unreachable
    │   ├── TableSizeError         table-too-large
    │   └── ExportError            cannot-export
    ├── GraphError
    │   ├── NoGraphError           no-graph
    │   ├── FreedGraphError        graph-freed
    │   ├── NoSuchNodeError        no-such-node
    │   ├── DetachedGraphError     graph-not-live
    │   ├── TraceError             bad-trace
    │   ├── StepperError           not-paused
    │   ├── ReplayError            cannot-rerun
    │   ├── CannotBundleError      cannot-bundle
    │   ├── DamagedBundleError     damaged-bundle
    │   ├── UntrustedBundleError   untrusted-bundle
    │   └── BundleVersionError     other-torch
    ├── RewriteError
    │   ├── RuleError              bad-rule
    │   └── CannotRewriteError     cannot-rewrite
    │       └── GraphBreakError    graph-break
    ├── FunctionError              bad-function
    ├── FeatureError               cannot-extract
    ├── AdjointError               cannot-check
    ├── ProbeError                 cannot-probe
    ├── CompareError               cannot-compare
    ├── SavedTensorError
    │   ├── OverwrittenError       saved-overwritten
    │   ├── RecomputeError         recomputed-otherwise
    │   ├── SavedPolicyError       bad-saved-policy
    │   └── BudgetError            budget-too-small
    ├── ExplainError               cannot-explain
    ├── LaunchError                cannot-launch
    ├── NoSuchNameError            no-such-name
    ├── CallError                  wrong-call
    ├── LibraryError               missing-library
    └── TorchVersionError          old-torch

Each class has a ``slug``: the name under which the documentation explains it.
A message says what is wrong, then how to fix it, then why we insist. Where Python has an error for the same mistake
(``KeyError``, ``ValueError``, ``TypeError``, ``FileNotFoundError`` …), ours is one of those too.
"""

from __future__ import annotations

from typing import ClassVar


class RetrogradError(Exception):
    """Base of all errors of this package.

    Args:
        problem: what is wrong, with the value that is wrong.
        repair: what to do instead, as a sentence or a line of code.
        reason: why this is refused; left out where it is plain.
    """

    slug: ClassVar[str] = "retrograd"

    def __init__(self, problem: str, *, repair: str = "", reason: str = "") -> None:
        self.problem = problem
        self.repair = repair
        self.reason = reason
        BaseException.__init__(self, problem, repair, reason)  # OSError's own takes them for a number and a file

    def __str__(self) -> str:
        parts = [f"{self.problem} [{self.slug}]"]
        if self.repair:
            parts.append(f"  Try: {self.repair}")
        if self.reason:
            parts.append(f"  Reason: {self.reason}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.problem, self.repair, self.reason)


def _rebuild(kind: type[RetrogradError], problem: str, repair: str, reason: str) -> RetrogradError:
    return kind(problem, repair=repair, reason=reason)


class SiteError(RetrogradError):
    """A place in the model is named wrongly."""

    slug = "site"


class SiteSyntaxError(SiteError, ValueError):
    """A text is not the name of a site."""

    slug = "site-syntax"


class NoSuchSiteError(SiteError, KeyError):
    """A name or pattern matches no site of this model or run."""

    slug = "no-such-site"


class NoSuchStepError(SiteError, IndexError, KeyError):
    """A step is asked for that has no entry; an ``IndexError`` and a ``KeyError``."""

    slug = "no-such-step"


class NothingKeptError(SiteError, IndexError):
    """A kept tensor is asked for of a site of which none was kept."""

    slug = "nothing-kept"


class PatternError(SiteError, ValueError):
    """A selection is given in a form that selects nothing."""

    slug = "bad-pattern"


class RecordingError(RetrogradError):
    """A recording cannot be started as asked."""

    slug = "recording"


class ScheduleError(RecordingError, ValueError):
    """A schedule selects no step, or is not a schedule."""

    slug = "bad-schedule"


class StatisticError(RecordingError, ValueError):
    """A user's statistic does not return one number per tensor."""

    slug = "bad-statistic"


class TensorPolicyError(RecordingError, ValueError):
    """A request to keep tensors that cannot be carried out."""

    slug = "bad-tensor-policy"


class ScalarError(RecordingError, TypeError):
    """What was logged is not a number."""

    slug = "not-a-scalar"


class AttachError(RecordingError):
    """The thing to record is not a module, or cannot carry hooks."""

    slug = "cannot-attach"


class RunError(RetrogradError):
    """A run folder cannot be written or read."""

    slug = "run"


class RunExistsError(RunError, FileExistsError):
    """The output folder already holds another run, or other files."""

    slug = "run-exists"


class NotARunError(RunError, FileNotFoundError):
    """A path is not a run folder."""

    slug = "not-a-run"


class NothingRecordedError(RunError, TypeError):
    """An argument holds nothing that was recorded."""

    slug = "nothing-recorded"


class DamagedRunError(RunError):
    """A file of a run folder cannot be read."""

    slug = "damaged-run"


class RunWriteError(RunError, OSError):
    """The run folder cannot be created or written."""

    slug = "run-not-writable"


class RunUnreachableError(RunError, OSError):
    """The store that a run lies in cannot be reached, or refuses to answer."""

    slug = "run-unreachable"


class TableSizeError(RunError):
    """A record is too large to be held as one table."""

    slug = "table-too-large"


class ExportError(RunError, ValueError):
    """A run cannot be written in this format."""

    slug = "cannot-export"


class GraphError(RetrogradError):
    """The backward graph cannot be followed as asked."""

    slug = "graph"


class NoGraphError(GraphError):
    """A tensor was made by no operation that autograd recorded."""

    slug = "no-graph"


class FreedGraphError(GraphError):
    """A backward pass has freed what its nodes had saved."""

    slug = "graph-freed"


class NoSuchNodeError(GraphError, KeyError):
    """A pattern matches no node of the graph."""

    slug = "no-such-node"


class DetachedGraphError(GraphError):
    """The nodes themselves are asked of a graph that is only data."""

    slug = "graph-not-live"


class TraceError(GraphError):
    """A trace cannot be made as asked, or its file cannot be read."""

    slug = "bad-trace"


class StepperError(GraphError):
    """Something is asked of a backward pass that is not paused at a node."""

    slug = "not-paused"


class ReplayError(GraphError):
    """A node cannot be run again with these gradients."""

    slug = "cannot-rerun"


class CannotBundleError(GraphError):
    """A node cannot be written in a form that runs in another process."""

    slug = "cannot-bundle"


class DamagedBundleError(GraphError):
    """A replay bundle cannot be read."""

    slug = "damaged-bundle"


class UntrustedBundleError(GraphError):
    """A replay bundle is not signed by this user, or was changed since, and nobody said that it is to be trusted."""

    slug = "untrusted-bundle"


class BundleVersionError(GraphError):
    """A replay bundle was written by another version of torch."""

    slug = "other-torch"


class RewriteError(RetrogradError):
    """Activations or gradients cannot be rewritten as asked."""

    slug = "rewrite"


class RuleError(RewriteError, ValueError):
    """An object is not a rule, or a rule raised, wrote into its argument, or returned what cannot take its place."""

    slug = "bad-rule"


class CannotRewriteError(RewriteError):
    """A place cannot carry a rule, or the rule would be lost there."""

    slug = "cannot-rewrite"


class GraphBreakError(CannotRewriteError, AssertionError):
    """A rule acts where compiled code cannot ask it, and the graph may not be broken there (``fullgraph=True``)."""

    slug = "graph-break"  # of Python's own errors, torch.compile hands on this one as it is


class FunctionError(RetrogradError):
    """A Function is written or used in a way that autograd could not follow."""

    slug = "bad-function"


class FeatureError(RetrogradError):
    """Features cannot be extracted as asked."""

    slug = "cannot-extract"


class AdjointError(RetrogradError):
    """A model cannot be checked for adjoints or kinks."""

    slug = "cannot-check"


class ProbeError(RetrogradError):
    """A question to a model and a batch cannot be answered with them."""

    slug = "cannot-probe"


class CompareError(RetrogradError, ValueError):
    """Two runs cannot be compared."""

    slug = "cannot-compare"


class SavedTensorError(RetrogradError):
    """Tensors that autograd saves cannot be looked at or kept as asked."""

    slug = "saved-tensor"


class OverwrittenError(SavedTensorError, RuntimeError):
    """A saved tensor was changed in place before the backward pass needed it.

    A ``RuntimeError`` too, as what autograd raises when nothing keeps saved tensors elsewhere.
    """

    slug = "saved-overwritten"


class RecomputeError(SavedTensorError, RuntimeError):
    """A forward that was run again for the backward pass computed something else than before.

    A ``RuntimeError`` too, as what torch's own checkpoint raises.
    """

    slug = "recomputed-otherwise"


class SavedPolicyError(SavedTensorError, ValueError):
    """Something is not a policy for saved tensors, or a policy gave back something else than it was given."""

    slug = "bad-saved-policy"


class BudgetError(SavedTensorError, ValueError):
    """A byte budget cannot be met."""

    slug = "budget-too-small"


class ExplainError(RetrogradError, TypeError):
    """Something is to be explained that was not recorded."""

    slug = "cannot-explain"


class LaunchError(RetrogradError):
    """The command to record cannot be started."""

    slug = "cannot-launch"


class NoSuchNameError(RetrogradError, AttributeError, KeyError):
    """Something has no attribute, or no entry, of this name; the call that does what was meant is named."""

    slug = "no-such-name"


class CallError(RetrogradError, TypeError):
    """A function is called with arguments that it does not take."""

    slug = "wrong-call"


class LibraryError(RetrogradError, ImportError):
    """A library that is to be recorded with is missing, or too old. An ``ImportError`` too."""

    slug = "missing-library"


class TorchVersionError(RetrogradError, ImportError):
    """The torch that is installed is too old. An ``ImportError`` too."""

    slug = "old-torch"


class RetrogradWarning(UserWarning):
    """Said once, during training, when something is not recorded as asked. Training goes on."""
