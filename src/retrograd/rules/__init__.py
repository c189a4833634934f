"""Rules: what takes the place of an activation or a gradient. These names are ``rg.rules``."""

from retrograd.rules.adagc import AdaGC as AdaGC
from retrograd.rules.agc import AGC as AGC
from retrograd.rules.auto_clip import AutoClip as AutoClip
from retrograd.rules.centralise import Centralise as Centralise
from retrograd.rules.clamp import Clamp as Clamp
from retrograd.rules.clamp import ClipValue as ClipValue
from retrograd.rules.clip_norm import ClipNorm as ClipNorm
from retrograd.rules.grokfast import Grokfast as Grokfast
from retrograd.rules.keep_sign import KeepSign as KeepSign
from retrograd.rules.mask import Mask as Mask
from retrograd.rules.mask import Zero as Zero
from retrograd.rules.noise import Noise as Noise
from retrograd.rules.norm_rule import NormRule as NormRule
from retrograd.rules.pass_rule import PassRule as PassRule
from retrograd.rules.pcgrad import PCGrad as PCGrad
from retrograd.rules.replace import Replace as Replace
from retrograd.rules.rule import Rule as Rule
from retrograd.rules.rule import SiteState as SiteState
from retrograd.rules.scale import Reverse as Reverse
from retrograd.rules.scale import Scale as Scale
from retrograd.rules.skip_step import SkipStep as SkipStep
from retrograd.rules.spike_clip import SpikeClip as SpikeClip
from retrograd.rules.stable_spam import EmaClip as EmaClip
from retrograd.rules.stable_spam import PeakClip as PeakClip
from retrograd.rules.substitute import Substitute as Substitute
from retrograd.rules.zclip import ZClip as ZClip
