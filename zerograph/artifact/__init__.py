"""Steps as files: graphs as JSON and tensors as safetensors. Reading one executes no code of it."""
