"""The KV cache: store the rows of each layer, attend to them, evict them and count them."""
