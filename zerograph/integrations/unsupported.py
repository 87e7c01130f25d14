"""Training arguments of transformers that have another meaning, or none, in a step that is one graph."""

from __future__ import annotations

from typing import Any

from zerograph.integrations.options import refuse


def refuse_unsupported(trainer: type, args: Any) -> None:
    """Raise if an argument, or a class that the trainer inherits from, is not supported.

    Raises:
        ConfigError: the message says what to do instead.
    """
    refuse(type(args).__name__, _arguments(args))
    kinds = [kind.__name__ for kind in trainer.__mro__ if kind.__module__.startswith("trl.")]
    refuse("trl", [(name, name.lstrip("_") not in _TRAINERS, _OTHER_TRAINER) for name in kinds])


def _arguments(args: Any) -> list[tuple[str, Any, str]]:
    accelerator = getattr(args, "accelerator_config", None)
    return [
        ("deepspeed", args.deepspeed, "ZeRO is zero=, such as Trainer(..., zero=3)"),
        ("fsdp", args.fsdp, "ZeRO is zero=, such as Trainer(..., zero=3)"),
        ("torch_compile", args.torch_compile, "the step is compiled; zero={'backend': 'inductor'} generates kernels"),
        ("fp16_full_eval", args.fp16_full_eval, "fp16=True evaluates in fp16 too"),
        ("bf16_full_eval", args.bf16_full_eval, "bf16=True evaluates in bf16 too"),
        ("auto_find_batch_size", args.auto_find_batch_size, "zero={'memory_budget': ...} makes a step fit"),
        (
            "optim='adafactor'",
            args.optim == "adafactor",
            "optimizer_cls_and_kwargs=(torch.optim.Adafactor, {'lr': ...}): that of transformers counts in Python",
        ),
        ("parallelism_config", args.parallelism_config, "a zg.ZeroGraph with config.mesh.placement places a step"),
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
        # Of TRL.
        *(
            (name, getattr(args, name, None), advice)
            for name, advice in (
                (
                    "activation_offloading",
                    "zero={'activation_checkpointing': 'blocks'} or {'offload': zg.Offload(activations=True)} saves it",
                ),
                ("padding_free", "the rows of a batch are split between the ranks: pad them"),
                ("precompute_ref_log_probs", "the reference model is part of the step, sharded at stage 3"),
                ("sync_ref_model", "the reference model is sharded and stays as it is"),
                ("use_vllm", "the model's own generate() is called"),
                ("use_transformers_continuous_batching", "the model's own generate() is called"),
            )
        ),
        (
            "packing",
            getattr(args, "packing", False) and getattr(args, "packing_strategy", "") != "wrapped",
            "packing_strategy='wrapped': the others make one row of a batch, and rows are split between the ranks",
        ),
    ]


# Trainers that generate what they compute a loss of.
GENERATING = ("GRPOTrainer", "RLOOTrainer")
# Others may generate, or count processes, in ways that are not known.
_TRAINERS = ("BaseTrainer", "SFTTrainer", "DPOTrainer", "RewardTrainer", "ORPOTrainer", "CPOTrainer", *GENERATING)
_OTHER_TRAINER = f"{', '.join(_TRAINERS[1:])} are supported; write other loops with zg.prepare()"
