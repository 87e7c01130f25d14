"""The passes, which rewrite the step graph. Ships as ``zerograph.passes``; knows the graph and SBP, not ``ZeroGraph``.

``pipeline``       the passes in order, and how they run: start here
``context``        the input of the passes besides the graph
``verify``         the invariants, checked where the scope of passes changes, and at the end

``normalize``      simplify, offsets, unfuse, repeat_key_heads, batch_first
``buckets``        flatten (owner_updates, coded_updates, flat_gradients), skip_overflowed_update, fuse
``accumulation``   split_micro_batches, hoist_batch_statistics, loop; time_boxing: boxing along the time dimension
``placement``      place (problem, solve, cost), shard_embeddings, box (boxing, route)
``recompute``      recompute_cheap, recompute (segments, min_cut, cost), reshard_after_forward, gather_keys_again
``lower``          localize (with inline, coded), add_in_tree, lower_to_p2p
``communication``  assign_wire_formats, coalesce, merge_exchanges, release, schedule
``memory``         offload_activations, reinplace, reuse_temporaries, prefetch_offloaded, offload, gather_in_place,
                   fit_memory_budget
``rules``          the SBPs that an operator's inputs and outputs may have together
"""
