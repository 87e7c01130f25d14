"""The passes: rewrite the step graph. Ships as ``zerograph.passes``; knows the graph and SBP, never ``ZeroGraph``.

``pipeline``       the passes in order, and how they run: start here
``context``        the input of the passes besides the graph
``verify``         the invariants, checked after each pass

``normalize``      simplify, offsets, unfuse, batch_first
``buckets``        flatten (with deal and flat_gradients), skip_overflowed_update, fuse
``accumulation``   split_micro_batches, hoist_batch_statistics, loop; in_time: boxing along the time dimension
``placement``      place (line, solve, cost), shard_embeddings, box (boxing, route)
``recompute``      recompute_cheap, recompute (segments, min_cut, work, make_again), reshard_after_forward
``lower``          localize (with inline), lower_to_p2p
``communication``  coalesce, release, schedule
``memory``         offload_activations, reinplace, reuse_temporaries, prefetch_offloaded, offload, gather_in_place,
                   fit_memory_budget
``rules``          which SBPs an operator's inputs and outputs may have together
"""
