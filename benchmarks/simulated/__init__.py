"""One rank of a job whose other ranks are simulated: who trains there, what a step costs, how it is measured."""
