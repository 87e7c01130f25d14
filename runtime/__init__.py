"""What runs the step graph. Ships as ``zerograph.runtime``; knows the graph and SBP, never ``ZeroGraph``.

``process_group``  the processes of a job: joining, leaving, agreeing before anything happens
``state``          what a rank holds between steps: shards of buckets and of optimizer state
``parameters``     what a module's parameters look like while their values are split
``backends``       from a local graph to a callable
``executor``       one compiled step: feeds it, runs it, explains a collective that failed
"""
