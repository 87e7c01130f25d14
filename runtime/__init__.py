"""Run the step graph. Ships as ``zerograph.runtime``; knows the graph and SBP, never ``ZeroGraph``.

``job``              the processes of a job: joining, comparing notes, liveness
``wire``             collectives and transports
``peer_memory``      a transport between ranks of one host; may be removed
``backends``         compile the local graph to a callable
``executor``         bind a compiled step to tensors, run it, explain failures
``reduce_overhead``  a form of the graph that is cheaper to call
``state``            shards of buckets and of optimizer state between steps
``feedback``         what coded gradients and weights have lacked so far
``parameters``       parameters whose values are split
``offload``          tensors in CPU memory or in files
``checkpoint``       files of a checkpoint
``find_nonfinite``   find the node that produced a NaN or an infinity
"""
