"""Saved tensors: policies that say where they wait for the backward pass. These names are ``rg.saved``."""

from retrograd.saved.cpu import Cpu as Cpu
from retrograd.saved.disk import Disk as Disk
from retrograd.saved.gradient_error import GradientError as GradientError
from retrograd.saved.gradient_error import measure_gradient_error as measure_gradient_error
from retrograd.saved.keep import Keep as Keep
from retrograd.saved.lossless import Lossless as Lossless
from retrograd.saved.plan import Plan as Plan
from retrograd.saved.planned import Planned as Planned
from retrograd.saved.policy import Packed as Packed
from retrograd.saved.policy import Policy as Policy
from retrograd.saved.policy import Saved as Saved
from retrograd.saved.precision import Bfloat16 as Bfloat16
from retrograd.saved.precision import EightBit as EightBit
from retrograd.saved.recompute import Recompute as Recompute
from retrograd.saved.when import When as When
