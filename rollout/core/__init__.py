"""The thinking part of the engine: which tokens are computed next, and in which KV blocks. Imports no torch."""
