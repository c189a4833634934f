"""Rules: what takes the place of an activation or a gradient. These names are ``rg.rules``."""

from retrograd.rules.clipping import AGC as AGC
from retrograd.rules.clipping import AdaGC as AdaGC
from retrograd.rules.clipping import AutoClip as AutoClip
from retrograd.rules.clipping import ClipNorm as ClipNorm
from retrograd.rules.clipping import SkipStep as SkipStep
from retrograd.rules.clipping import ZClip as ZClip
from retrograd.rules.elements import Centralise as Centralise
from retrograd.rules.elements import Clamp as Clamp
from retrograd.rules.elements import ClipValue as ClipValue
from retrograd.rules.elements import Grokfast as Grokfast
from retrograd.rules.elements import KeepSign as KeepSign
from retrograd.rules.elements import Mask as Mask
from retrograd.rules.elements import Noise as Noise
from retrograd.rules.elements import Replace as Replace
from retrograd.rules.elements import Reverse as Reverse
from retrograd.rules.elements import Scale as Scale
from retrograd.rules.elements import Zero as Zero
from retrograd.rules.norm_rule import NormRule as NormRule
from retrograd.rules.pass_rule import PassRule as PassRule
from retrograd.rules.pass_rule import PCGrad as PCGrad
from retrograd.rules.rule import Rule as Rule
from retrograd.rules.rule import SiteState as SiteState
from retrograd.rules.spam import EmaClip as EmaClip
from retrograd.rules.spam import PeakClip as PeakClip
from retrograd.rules.spam import SpikeClip as SpikeClip
from retrograd.rules.substitute import Substitute as Substitute
