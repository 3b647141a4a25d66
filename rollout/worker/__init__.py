"""One device: its weights, its KV pool, its memory ledger, and the execution of plans."""
