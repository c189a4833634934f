"""Every name of torch's that is not public and that we rest on: what it buys, and what happens without it.

A name is written as the code has it, from ``torch`` on; an attribute as ``holder:_name``, with the class or module that
has it, or as ``holder:self._name`` with the one that gives it to objects. One that we set, and later versions of torch
ask for, is ``._name``.
``tests/core/hooks/test_private_names.py`` holds the table to the source, and ``docs/private_names.md`` is made of it.

Those in ``NEEDED`` are there in each torch that is supported, which the tests run with. Those in ``OPTIONAL`` are asked
for, as ``module:name``, before they are used: where one is missing, that is said once, and all that it buys is left.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PrivateNames:
    """Names that are used for one thing.

    Attributes:
        buys: what they are used for.
        without: what happens where one is missing.
        names: the names.
    """

    buys: str
    without: str
    names: tuple[str, ...]


def _names(buys: str, without: str, *words: str) -> PrivateNames:
    return PrivateNames(buys, without, tuple(name for each in words for name in each.split()))


GLOBAL_TABLES = {
    "torch.nn.modules.module": tuple(
        f"_global_{name}_hooks" for name in ("forward_pre", "forward", "backward_pre", "backward")
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}
"""Tables of hooks on all modules and on all optimizers."""

_STOPS = "retrograd cannot be imported"
_RAISES = "what needs it raises; while a program trains, a warning says so, and less is recorded"

NEEDED: tuple[PrivateNames, ...] = (
    _names(
        "which backward pass and which node run in this thread, and the number of the next node",
        _STOPS,
        "torch._C._current_graph_task_id torch._C._current_autograd_node torch.autograd._get_sequence_nr "
        "torch._C._functions.AccumulateGrad:_sequence_nr",
    ),
    _names(
        "gradients by sample: what a convolution computes, and which modules normalise",
        _RAISES,
        "torch.nn.Conv2d:_conv_forward torch.nn.modules.batchnorm:_BatchNorm "
        "torch.nn.modules.instancenorm:_InstanceNorm",
    ),
    _names("a call at the end of a pass", _RAISES, "torch.autograd.Variable._execution_engine.queue_callback"),
    _names(
        "a pass of our own inside one of the program's, and passes that checkpoints begin",
        _RAISES,
        "torch.autograd.graph._engine_run_backward torch._C._functions.AccumulateGrad:_set_sequence_nr",
    ),
    _names(
        "what a node is, what it keeps, and whose function it came from",
        _STOPS,
        "torch._C._FunctionBase.__basicsize__ torch._C._autograd.SavedTensor torch._C._functions.AccumulateGrad "
        "torch._C._functions.AccumulateGrad:_input_metadata torch.autograd.function.FunctionMeta:self._backward_cls "
        "torch.autograd.function.BackwardCFunction:self._forward_cls",
    ),
    _names(
        "hooks on tensors and nodes without a number of torch's, so that the program's keep theirs",
        _RAISES,
        "torch.Tensor:_backward_hooks torch._C._functions.AccumulateGrad:_register_hook_dict "
        "torch.Tensor:_post_accumulate_grad_hooks",
    ),
    _names(
        "hooks on all modules and optimizers, and those on one that refuses to be asked for them",
        _RAISES,
        "torch.nn.modules.module:_global_forward_hooks "
        "torch.nn.modules.module:_global_forward_hooks_always_called "
        "torch.nn.modules.module:_global_forward_pre_hooks "
        "torch.nn.modules.module:_global_module_registration_hooks "
        "torch.nn.modules.module:_global_parameter_registration_hooks "
        "torch.optim.optimizer:_global_optimizer_pre_hooks torch.optim.optimizer:_global_optimizer_post_hooks "
        "torch.optim.Optimizer:self._optimizer_step_pre_hooks torch.optim.Optimizer:self._optimizer_step_post_hooks",
    ),
    _names("on the stack, which module is called", _STOPS, "torch.nn.Module:_call_impl"),
    _names(
        "losses of evaluations that the program computes itself: the functions that `torch.nn.functional` calls",
        _STOPS,
        "torch._C._nn.binary_cross_entropy torch._C._nn.cross_entropy_loss torch._C._nn.huber_loss "
        "torch._C._nn.l1_loss torch._C._nn.mse_loss torch._C._nn.nll_loss_nd torch._C._nn.smooth_l1_loss",
    ),
    _names("models are scripted without our hooks", _RAISES, "torch.jit._recursive"),
    _names(
        "the stack of hooks on saved tensors, and whether one belongs to a checkpoint",
        _RAISES,
        "torch._C._autograd._pop_saved_tensors_default_hooks torch._C._autograd._push_saved_tensors_default_hooks "
        "torch._C._autograd._saved_tensors_hooks_is_enabled torch._C._autograd._top_saved_tensors_default_hooks "
        "torch._C._autograd torch._C._get_tracing_state torch._C._set_tracing_state "
        "torch._C._autograd:_pop_saved_tensors_default_hooks torch._C._autograd:_push_saved_tensors_default_hooks "
        "torch._C._autograd:_top_saved_tensors_default_hooks torch._C._autograd:_saved_tensors_hooks_is_enabled "
        "torch._C._autograd:_saved_tensors_hooks_disable "
        "torch._C._autograd:_saved_tensors_hooks_get_disabled_error_message ._checkpoint_internal ._user_hooks",
    ),
    _names(
        "which part of a forward a checkpoint computes again",
        _RAISES,
        "torch.utils.checkpoint._StopRecomputationError torch._higher_order_ops.cond.CondAutogradOp "
        "torch._C._set_grad_enabled torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
    ),
    _names(
        "function modes: which are on, and ours as the innermost",
        _RAISES,
        "torch._C.DisableTorchFunction torch._C.DisableTorchFunctionSubclass torch._C._get_function_stack_at "
        "torch._C._len_torch_function_stack torch._C._pop_torch_function_stack "
        "torch._C._push_on_torch_function_stack torch.overrides._get_current_function_mode_stack "
        "torch.overrides._push_mode torch.utils._python_dispatch:_push_mode torch.utils._device.DeviceContext",
    ),
    _names(
        "operations below autograd: which modes are on, and running one past them",
        _RAISES,
        "torch._C.DispatchKey.ADInplaceOrView torch._C.DispatchKey.Conjugate torch._C.DispatchKey.Negative "
        "torch._C.DispatchKey.ZeroTensor torch._C._AutoDispatchBelowAutograd torch._C._DisableTorchDispatch "
        "torch._C._InferenceMode torch._C._dispatch_tls_is_dispatch_key_excluded "
        "torch._C._dispatch_tls_set_dispatch_key_excluded torch._C._get_dispatch_mode "
        "torch._C._get_dispatch_stack_at torch._C._TorchDispatchModeKey torch._C._len_torch_dispatch_stack "
        "torch._C._pop_torch_dispatch_stack torch._C._push_on_torch_dispatch_stack torch._ops.OpOverload "
        "torch._ops.OpOverloadPacket torch._ops._len_torch_dispatch_stack_pre_dispatch "
        "torch.utils._python_dispatch torch.utils._python_dispatch.TorchDispatchMode "
        "torch.utils._python_dispatch._disable_current_modes torch.utils._python_dispatch:_disable_current_modes "
        "torch.utils._python_dispatch:_get_current_dispatch_mode_stack torch._ops.OpOverload:self._schema",
    ),
    _names(
        "what kind of tensor this is: whether it has memory, a mode of its own, or stands for others",
        _RAISES,
        "torch._C._functorch torch._C._functorch.is_functorch_wrapped_tensor "
        "torch._C._functorch.is_legacy_batchedtensor torch._C._functorch.peek_interpreter_stack "
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack torch._C._is_tracing "
        "torch._is_functional_tensor torch._mkldnn torch._neg_view torch._efficientzerotensor "
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass torch.Tensor:_is_view "
        "torch.Tensor:_is_zerotensor torch.Tensor:_indices",
    ),
    _names(
        "which storages share memory, and who holds one",
        _RAISES,
        "torch._C._storage_Use_Count torch.UntypedStorage._new_with_weak_ptr "
        "torch._C._autograd._unsafe_set_version_counter torch.UntypedStorage:_cdata",
    ),
    _names(
        "a call of ours that leaves all settings of a thread as they were",
        _RAISES,
        "torch._C._get_privateuse1_backend_name torch._C._is_fwd_grad_enabled torch._C._is_multithreading_enabled "
        "torch._C._is_view_replay_enabled torch._C._set_fwd_grad_enabled torch._C._set_multithreading_enabled "
        "torch._C._set_view_replay_enabled torch._foreach_neg",
    ),
    _names("norms of many tensors in one operation", _RAISES, "torch._foreach_mul_ torch._foreach_norm"),
    _names(
        "gradients that are sharded, reduced or gathered: by DDP, FSDP and pipelines",
        "sharded parameters are not recorded as wholes",
        "torch.nn.parallel.DistributedDataParallel:_active_ddp_module "
        "torch.nn.parallel.DistributedDataParallel:_check_reducer_finalized "
        "torch.distributed.pipelining.stage:_PipelineStageBase torch.distributed.tensor.DTensor:_spec "
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:self._fsdp_param_group "
        "torch.distributed.fsdp.FSDPModule:_get_fsdp_state "
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam:self._module_info "
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:self._partial_reduce_output "
        "torch.distributed.fsdp._flat_param.FlatParameter:self._params "
        "torch.distributed.fsdp._flat_param.FlatParamHandle:self._use_orig_params torch.distributed._composable_state",
    ),
    _names(
        "the store of a process group, by which ranks agree on the steps that a budget records",
        _RAISES,
        "torch.distributed.distributed_c10d:_get_default_store",
    ),
    _names(
        "our functions run in the interpreter, whatever torch.compile does around them",
        _STOPS,
        "torch._C._dynamo.eval_frame torch._C._dynamo.eval_frame:_FrameAction "
        "torch._C._dynamo.eval_frame:_FrameExecStrategy torch._C._dynamo.eval_frame:_debug_get_cache_entry_list "
        "torch._dynamo.decorators:self._torchdynamo_disable torch._dynamo.decorators:self._torchdynamo_disable_msg "
        "torch._dynamo.decorators:self._dynamo_marked_constant torch._dynamo.graph_break "
        "torch.nn.Module:_compiled_call_impl",
    ),
    _names(
        "where calls of compiled code begin and end, and what has been compiled",
        "said once; inside compiled code less is recorded",
        "torch._dynamo.eval_frame torch._dynamo.convert_frame torch._dynamo.external_utils "
        "torch._dynamo.output_graph torch._dynamo.symbolic_convert torch._dynamo.compiled_autograd "
        "torch.export._trace",
    ),
    _names(
        "operations of ours in a graph: whether it is traced without values, and autograd inside of one",
        "said once; nothing is recorded in compiled code",
        "torch._subclasses.fake_tensor.FakeTensor torch._subclasses.functional_tensor.FunctionalTensor "
        "torch._C.DispatchKeySet torch._C.DispatchKey.AutogradFunctionality torch._C._ForceDispatchKeyGuard "
        "torch._C._dispatch_tls_local_exclude_set torch._C._dispatch_tls_local_include_set",
    ),
)

_CALLS = "torch._dynamo.variables.nn_module"

OPTIONAL: dict[str, PrivateNames] = {
    "short calls": PrivateNames(
        "torch traces a call of a module with taps as it does one without hooks",
        "torch traces its search for hooks: compiling takes longer",
        tuple(
            f"{_CALLS}:{name}"
            for name in (
                "UnspecializedNNModuleVariable.call_function",
                "UnspecializedNNModuleVariable.get_nn_module_stack_source",
                "is_lazy_module",
                "guard_to_detect_forward_monkeypatching",
                "record_nn_module_stack",
                "AttrSource",
                "DictGetItemSource",
                "ConstDictKeySource",
                "VariableTracker.build",
                "variables.TensorVariable",
                "variables.ConstantVariable",
                "variables.ConstDictVariable",
                "variables.TupleVariable",
                "variables.UserFunctionVariable",
            )
        ),
    ),
    "missing hooks": _names(
        "a like module without a tap has a graph of its own",
        "modules of torch's own classes that are recorded later may not be seen in code that was compiled before",
        "torch._dynamo.guards:GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT "
        "torch._dynamo.guards:GuardBuilder.SEQUENCE_LENGTH",
    ),
    "handles": _names(
        "handles are not guarded one by one",
        "calls of compiled code check a few tensors more",
        "torch._dynamo.guards:GuardBuilder.TENSOR_MATCH",
    ),
    "boundaries": _names(
        "of what a compiled module returns and its own graph uses, the whole gradient is recorded",
        "only the part that comes from outside of the graph is",
        "torch._dynamo.symbolic_convert:InstructionTranslator._return torch._dynamo.variables:TensorVariable "
        "torch._dynamo.variables:UserFunctionVariable torch._dynamo.variables:CellVariable "
        "torch._dynamo.variables:base "
        "torch._dynamo.source:AttrSource torch._dynamo.source:DictGetItemSource "
        "torch._dynamo.resume_execution:ContinueExecutionCache.generated_code_metadata torch._dynamo.exc:Unsupported",
    ),
    "graph outputs": _names(
        "rules act on what a compiled module returns where all of its gradient comes from outside",
        "rules on what a graph with several results returns are refused",
        "torch._dynamo.output_graph:OutputGraph.call_user_compiler",
    ),
    "written calls": _names(
        "operations of ours are written into the graph that is traced with its backward",
        "torch traces each of them: compiling takes longer",
        "torch.fx.experimental.proxy_tensor:PythonKeyTracer.create_proxy "
        "torch.fx.experimental.proxy_tensor:disable_proxy_modes_tracing "
        "torch.fx.experimental.proxy_tensor:get_proxy_slot torch.fx.experimental.proxy_tensor:track_tensor_tree "
        "torch._subclasses.functional_tensor:FunctionalTensor.from_functional "
        "torch._subclasses.functional_tensor:FunctionalTensor.to_functional "
        "torch._subclasses.functional_tensor:disable_functional_mode torch.utils._mode_utils:no_dispatch",
    ),
    "plain calls": PrivateNames(
        "Inductor writes a call of a function of ours where it would call torch's dispatcher",
        "it calls the dispatcher: what is recorded in compiled code costs more",
        (
            "torch._inductor.lowering:V",
            "torch._inductor.lowering:register_lowering",
            *(
                f"torch._inductor.lowering:ir.{name}"
                for name in (
                    "FallbackKernel.create",
                    "FallbackKernel.has_side_effects",
                    "FixedLayout",
                    "IRNode.codegen_reference",
                    "IRNode.get_device",
                    "NoneLayout",
                    "TensorBox.create",
                    "as_storage_and_layout",
                    "dependencies.StarDep",
                    "is_storage_and_layout",
                    "ExternKernelAlloc.codegen",
                    "ExternKernelAlloc.codegen_args",
                    "ExternKernelAlloc.get_name",
                    "ExternKernelAlloc.get_read_writes",
                    "ExternKernelAlloc.realize_input",
                )
            ),
            "torch._inductor.ir:MultiOutput",
            "torch._inductor.scheduler:Scheduler.compute_last_usage",
            "torch.utils._pytree:tree_map_only",
        ),
    ),
}
"""Names of torch.compile's layers, by what needs them."""


def is_there(name: str) -> bool:
    """Whether the torch of this process has one of these names; loads its module.

    What objects are given when they are made is looked for in the source.
    """
    if name.startswith("."):
        return True
    holder, _, attribute = name.partition(":self.")
    try:
        found = _find(holder.replace(":", "."))
        return not attribute or re.search(rf"\b{attribute}\b", inspect.getsource(found)) is not None
    except (ImportError, AttributeError, OSError):
        return False


def write_name(name: str) -> str:
    """A name of these tables as text."""
    return name.replace(":self.", ".").replace(":", ".")


def _find(path: str) -> Any:
    """A module, or what it holds."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)
