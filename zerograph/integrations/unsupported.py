"""Training arguments of transformers that have another meaning, or none, in a step that is one graph."""

from __future__ import annotations

from typing import Any


def unsupported(args: Any) -> dict[str, str]:
    """Return the unsupported arguments that are set, and what to do instead of each."""
    accelerator = getattr(args, "accelerator_config", None)
    table: list[tuple[str, Any, str]] = [
        ("deepspeed", args.deepspeed, "ZeRO is zero=, such as Trainer(..., zero=3)"),
        ("fsdp", args.fsdp, "ZeRO is zero=, such as Trainer(..., zero=3)"),
        ("torch_compile", args.torch_compile, "the step is compiled; zero={'backend': 'inductor'} generates kernels"),
        ("fp16", args.fp16, "bf16=True"),
        ("fp16_full_eval", args.fp16_full_eval, "bf16=True evaluates in bf16 too"),
        ("bf16_full_eval", args.bf16_full_eval, "bf16=True evaluates in bf16 too"),
        ("auto_find_batch_size", args.auto_find_batch_size, "zero={'memory_budget': ...} makes a step fit"),
        ("parallelism_config", args.parallelism_config, "zero={'placement': zg.placement(...)} places the step"),
        ("use_liger_kernel", args.use_liger_kernel, "zero={'backend': 'inductor'} fuses operators"),
        ("debug", [one for one in args.debug if "underflow" in str(one)], "zero={'on_nonfinite': 'raise'}"),
        (
            "train_sampling_strategy='batch_rebalance'",
            args.train_sampling_strategy == "batch_rebalance",
            "'group_by_length'; ranks share each batch anyway",
        ),
        ("n_gpu", args.n_gpu > 1, "one process per GPU: launch with torchrun"),
        (
            "accelerator_config.dispatch_batches",
            getattr(accelerator, "dispatch_batches", None),
            "every rank reads its rows",
        ),
    ]
    return {name: advice for name, value, advice in table if value}
