"""LoRA adapters (Hu et al., 2021) that the engine applies beside the weights: reading, slots in memory, requests."""
