"""The private torch API that zerograph uses: one wrapper each, with the reason.

Supported: torch 2.11 to 2.15. When torch moves, this is the only package to change.

``tracing``      fake tensors, ``make_fx``, metadata of nodes, Inductor
``attention``    FlexAttention
``autograd``     backward, checkpointing, hooks on gradients
``sizes``        symbolic sizes
``shapes``       shapes of operators with symbolic sizes
``tensors``      tensors, storages, subclasses
``modules``      modules, their hooks, functions of ``torch.nn``
``operators``    schemas and overloads of operators
``optimizers``   optimizers, their hooks, learning rate schedulers
``settings``     settings, modes and kernels that change what a trace yields
``distributed``  process groups and collectives
"""

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

# torch.export's rules for nested values, and the types that users registered with it.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zerograph._torch.attention import (
    compiled_functions_run_plainly,
    dense_blocks,
    indexed_by_tensors,
    is_identity,
    mask_of_blocks,
    replaced_flex_attention,
    sizes_untraced,
    uses_flex_attention,
)
from zerograph._torch.autograd import (
    ambient_autocast,
    backward_sequence_number,
    eager_checkpoint_policies,
    forward_sequence_number,
    gradient_hooks,
    has_gradient_hooks,
    is_transforming,
    outside_transforms,
    reaches_all_leaves,
    recomputing_modules,
    replaced_backward,
)
from zerograph._torch.distributed import (
    all_gather,
    lazy_nccl,
    process_group,
    register_works,
    replaced_object_collectives,
    set_timeout,
    single_process_store,
)
from zerograph._torch.expressions import describe_number, rebuild_number, unknown_numbers
from zerograph._torch.fake_results import empty_fake
from zerograph._torch.modules import (
    adaptive_output,
    hook_tables,
    module_hooks,
    module_tables,
    nn_kernels,
    not_compiled,
    recurrent_functions,
    replace_function,
    replaced_total_norm,
    trusted_causal_flags,
    unchecked_distributions,
    unchecked_values,
    unsaved_buffers,
    with_tensors,
)
from zerograph._torch.operators import (
    functional_overload,
    has_kernel,
    in_place_overload,
    is_composite,
    is_mutable,
    operator_functions,
    overload_without_out,
    overloads,
    returns,
    schema_arguments,
    set_arguments,
    triton_body,
    unwrapped,
    viewed_arguments,
    written_arguments,
    written_tensors,
)
from zerograph._torch.optimizers import (
    closed_form_rates,
    functions_of_instance_step,
    has_closed_form_rates,
    initial_state,
    mark_devices_checked,
    mark_step_called,
    replace_unscaling,
    step_hooks,
    step_pre_hook_tables,
    unhooked_step,
    wrapped_with_hooks,
)
from zerograph._torch.settings import active_modes, python_kernels, trace_settings
from zerograph._torch.shapes import has_symbols
from zerograph._torch.sizes import (
    SizeEnv,
    coefficient,
    condition_holds,
    condition_text,
    conditions,
    constant_value,
    depends_on_values,
    differs_from_one,
    emit_size,
    evaluate_number,
    evaluate_size,
    is_equality,
    is_multiple,
    is_positive,
    is_symbol,
    negated,
    new_size,
    raw_sizes,
    separate_env,
    size_hint,
    size_key,
    substitute,
    symbols_of,
)
from zerograph._torch.tensors import (
    COMPATIBLE_TYPES,
    borrowed,
    no_torch_function,
    plain_tensors,
    share_memory,
    storage_key,
    tensor_without_data,
    version,
    without_dispatch,
    without_torch_function,
)
from zerograph._torch.tracing import (
    CachingFakeMode,
    annotated,
    cache_folder,
    compiled_modules,
    compiled_original,
    compiling,
    decompositions,
    errors_unlogged,
    fake_inputs,
    fake_mode,
    fake_mode_of,
    functional_trace,
    graph_module,
    inductor,
    inductor_rounds_each_operator,
    is_inherited,
    no_modes,
    node_of,
    preserved_metadata,
    python_decompositions,
    replaced_generator,
    size_env,
    trace,
    untagged,
    without_onednn,
)


class PlainMode(TorchDispatchMode):
    """A mode whose handler Dynamo may follow: torch's wrapper that keeps it out costs as much as many handlers."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
