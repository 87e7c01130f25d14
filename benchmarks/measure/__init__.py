"""How a contender is measured: a pair of processes of its own, and what each of them tells."""
