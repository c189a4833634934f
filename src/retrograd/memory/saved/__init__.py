"""Saved tensors: policies that say where they wait for the backward pass. These names are ``rg.saved``."""

from retrograd.memory.budget.plan import Plan as Plan
from retrograd.memory.budget.planned import Planned as Planned
from retrograd.memory.policies.cpu import Cpu as Cpu
from retrograd.memory.policies.disk import Disk as Disk
from retrograd.memory.policies.lossless import Lossless as Lossless
from retrograd.memory.policies.policy import AsIs as AsIs
from retrograd.memory.policies.policy import Packed as Packed
from retrograd.memory.policies.policy import Policy as Policy
from retrograd.memory.policies.policy import Saved as Saved
from retrograd.memory.policies.precision import Bfloat16 as Bfloat16
from retrograd.memory.policies.precision import EightBit as EightBit
from retrograd.memory.policies.recompute import Recompute as Recompute
from retrograd.memory.policies.when import When as When
from retrograd.memory.saved.gradient_error import GradientError as GradientError
from retrograd.memory.saved.gradient_error import measure_gradient_error as measure_gradient_error
