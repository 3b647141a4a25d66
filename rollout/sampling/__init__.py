"""From logits to tokens: parameters to arrays, counter-based noise, one fused kernel."""
