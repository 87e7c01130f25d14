"""The private torch API that zerograph uses: one wrapper each, with the reason.

Supported: torch 2.11 to 2.13. When torch moves, this is the only package to change.

``tracing``      fake tensors, ``make_fx``, metadata of nodes, Inductor
``attention``    FlexAttention
``autograd``     backward, checkpointing, hooks on gradients
``sizes``        symbolic sizes
``tensors``      tensors, storages, subclasses
``modules``      modules, their hooks, functions of ``torch.nn``
``operators``    schemas and overloads of operators
``optimizers``   optimizers, their hooks, learning rate schedulers
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
    uses_flex_attention,
)
from zerograph._torch.autograd import (
    backward_sequence_number,
    eager_checkpoint_policies,
    forward_sequence_number,
    gradient_hooks,
    has_gradient_hooks,
    recomputing_modules,
    replaced_backward,
)
from zerograph._torch.distributed import (
    all_gather,
    process_group,
    register_works,
    replaced_object_collectives,
    single_process_store,
)
from zerograph._torch.modules import (
    adaptive_output,
    hook_tables,
    module_hooks,
    module_tables,
    replace_function,
    replaced_total_norm,
    trusted_causal_flags,
    unsaved_buffers,
    with_tensors,
)
from zerograph._torch.operators import (
    functional_overload,
    in_place_overload,
    is_mutable,
    overloads,
    returns,
    schema_arguments,
    unwrapped,
    viewed_arguments,
    written_arguments,
    written_tensors,
)
from zerograph._torch.optimizers import (
    closed_form_rates,
    has_closed_form_rates,
    initial_state,
    mark_devices_checked,
    mark_step_called,
    step_hooks,
    step_pre_hook_tables,
    unhooked_step,
)
from zerograph._torch.sizes import (
    SizeEnv,
    coefficient,
    condition_text,
    depends_on_values,
    emit_size,
    evaluate_size,
    is_multiple,
    new_size,
    raw_sizes,
    size_hint,
    size_key,
    substitute,
    symbols_of,
)
from zerograph._torch.tensors import (
    COMPATIBLE_TYPES,
    negative_view,
    plain_tensors,
    storage_key,
    tensor_without_data,
    version,
    without_torch_function,
)
from zerograph._torch.tracing import (
    CachingFakeMode,
    annotated,
    cache_folder,
    compiled_modules,
    compiling,
    decompositions,
    errors_unlogged,
    fake_inputs,
    fake_mode,
    fake_mode_of,
    functional_trace,
    graph_module,
    inductor,
    no_modes,
    preserved_metadata,
    replaced_generator,
    size_env,
    trace,
    without_onednn,
)

__all__ = [
    "COMPATIBLE_TYPES",
    "CachingFakeMode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "OpOverload",
    "SizeEnv",
    "TorchDispatchMode",
    "adaptive_output",
    "all_gather",
    "annotated",
    "backward_sequence_number",
    "cache_folder",
    "closed_form_rates",
    "coefficient",
    "compiled_functions_run_plainly",
    "compiled_modules",
    "compiling",
    "condition_text",
    "decompositions",
    "dense_blocks",
    "depends_on_values",
    "eager_checkpoint_policies",
    "emit_size",
    "errors_unlogged",
    "evaluate_size",
    "fake_inputs",
    "fake_mode",
    "fake_mode_of",
    "forward_sequence_number",
    "functional_overload",
    "functional_trace",
    "gradient_hooks",
    "graph_module",
    "has_closed_form_rates",
    "has_gradient_hooks",
    "hook_tables",
    "in_place_overload",
    "indexed_by_tensors",
    "inductor",
    "initial_state",
    "is_identity",
    "is_multiple",
    "is_mutable",
    "mark_devices_checked",
    "mark_step_called",
    "mask_of_blocks",
    "module_hooks",
    "module_tables",
    "negative_view",
    "new_size",
    "no_modes",
    "overloads",
    "plain_tensors",
    "preserved_metadata",
    "process_group",
    "pytree",
    "raw_sizes",
    "recomputing_modules",
    "register_works",
    "replace_function",
    "replaced_backward",
    "replaced_flex_attention",
    "replaced_generator",
    "replaced_object_collectives",
    "replaced_total_norm",
    "returns",
    "schema_arguments",
    "single_process_store",
    "size_env",
    "size_hint",
    "size_key",
    "step_hooks",
    "step_pre_hook_tables",
    "storage_key",
    "substitute",
    "symbols_of",
    "tensor_without_data",
    "trace",
    "trusted_causal_flags",
    "unhooked_step",
    "unsaved_buffers",
    "unwrapped",
    "uses_flex_attention",
    "version",
    "viewed_arguments",
    "with_tensors",
    "without_onednn",
    "without_torch_function",
    "written_arguments",
    "written_tensors",
]
