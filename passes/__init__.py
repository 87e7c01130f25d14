"""What rewrites the step graph. Ships as ``zerograph.passes``; knows the graph and SBP, never ``ZeroGraph``.

``pipeline``   the passes in their order: start here
``context``    what a pass is told besides the graph
``simplify`` ``offsets`` ``unfuse`` ``reorder`` ``flatten`` ``guard`` ``take_turns`` ``place`` ``lookup`` ``box``
``ahead`` ``remake`` ``recompute`` ``regather`` ``localize`` ``loop`` ``coalesce`` ``fuse`` ``release`` ``schedule``
``exchange`` ``spill`` ``reinplace`` ``overwrite`` ``carry`` ``offload`` ``fill_rooms`` ``fit`` one pass each, in this
order; those behind ``loop`` act on the graph and, but for the last two, on the bodies of its loops
``segments`` ``min_cut`` ``work`` ``make_again``   what recompute does: where forward is cut, which values pay, copies
``flat_gradients``   what flatten does with edits and norms of gradients
``verify``     what must hold after each
``in_time``    boxing along the mesh dimension that is time, between ``take_turns`` and ``loop``
``inline``     a local region's graph in the place of its node
``boxing``     the boxing node and what it costs
``rules``      which SBPs an operator's inputs and outputs may have together
``edit``       making nodes
"""
