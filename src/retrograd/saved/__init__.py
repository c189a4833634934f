"""Saved tensors: policies that say where they wait for the backward pass. These names are ``rg.saved``."""

from retrograd.budget.plan import Plan as Plan
from retrograd.budget.planned import Planned as Planned
from retrograd.policies.cpu import Cpu as Cpu
from retrograd.policies.disk import Disk as Disk
from retrograd.policies.lossless import Lossless as Lossless
from retrograd.policies.policy import AsIs as AsIs
from retrograd.policies.policy import Packed as Packed
from retrograd.policies.policy import Policy as Policy
from retrograd.policies.policy import Saved as Saved
from retrograd.policies.precision import Bfloat16 as Bfloat16
from retrograd.policies.precision import EightBit as EightBit
from retrograd.policies.recompute import Recompute as Recompute
from retrograd.policies.when import When as When
from retrograd.saved.gradient_error import GradientError as GradientError
from retrograd.saved.gradient_error import measure_gradient_error as measure_gradient_error
