"""The only place that asks which device the engine runs on."""
