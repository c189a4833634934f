"""Rules: what takes the place of an activation or a gradient. These names are ``rg.rules``."""

import typing

from retrograd.core.guesses import guide as _guide
from retrograd.rewriting.rules.clipping import AGC as AGC
from retrograd.rewriting.rules.clipping import AdaGC as AdaGC
from retrograd.rewriting.rules.clipping import AutoClip as AutoClip
from retrograd.rewriting.rules.clipping import ClipNorm as ClipNorm
from retrograd.rewriting.rules.clipping import SkipStep as SkipStep
from retrograd.rewriting.rules.clipping import ZClip as ZClip
from retrograd.rewriting.rules.elements import Centralise as Centralise
from retrograd.rewriting.rules.elements import Clamp as Clamp
from retrograd.rewriting.rules.elements import ClipValue as ClipValue
from retrograd.rewriting.rules.elements import Grokfast as Grokfast
from retrograd.rewriting.rules.elements import KeepSign as KeepSign
from retrograd.rewriting.rules.elements import Mask as Mask
from retrograd.rewriting.rules.elements import Noise as Noise
from retrograd.rewriting.rules.elements import Replace as Replace
from retrograd.rewriting.rules.elements import Reverse as Reverse
from retrograd.rewriting.rules.elements import Scale as Scale
from retrograd.rewriting.rules.elements import Zero as Zero
from retrograd.rewriting.rules.norm_rule import NormRule as NormRule
from retrograd.rewriting.rules.pass_rule import PassRule as PassRule
from retrograd.rewriting.rules.pass_rule import PCGrad as PCGrad
from retrograd.rewriting.rules.rule import Rule as Rule
from retrograd.rewriting.rules.rule import SiteState as SiteState
from retrograd.rewriting.rules.spam import EmaClip as EmaClip
from retrograd.rewriting.rules.spam import PeakClip as PeakClip
from retrograd.rewriting.rules.spam import SpikeClip as SpikeClip
from retrograd.rewriting.rules.substitute import Substitute as Substitute

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise _guide("rules", name, globals(), what="rg.rules")
