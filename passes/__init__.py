"""What rewrites the step graph. Ships as ``zerograph.passes``; knows the graph and SBP, never ``ZeroGraph``.

``pipeline``   the passes in their order: start here
``context``    what a pass is told besides the graph
``simplify`` ``unfuse`` ``reorder`` ``flatten`` ``place`` ``box`` ``remake`` ``regather`` ``localize`` ``fuse``
``release`` ``schedule`` ``exchange`` ``reinplace`` ``overwrite`` ``fit``   one pass each, in this order
``flat_gradients``   what flatten does with edits and norms of gradients
``verify``     what must hold after each
``inline``     a local region's graph in the place of its node
``boxing``     the boxing node and what it costs
``rules``      which SBPs an operator's inputs and outputs may have together
``edit``       making nodes
"""
