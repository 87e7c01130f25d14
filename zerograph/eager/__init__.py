"""Global tensors outside of graphs: operators on them run at once, each as a small graph of the compiler."""
