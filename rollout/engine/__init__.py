"""The engine proper: one object that takes requests, steps, sleeps, and changes policies."""
