"""Training loops as users write them: calls of models and updates are graphs, the rest runs on global tensors."""
