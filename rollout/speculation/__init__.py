"""Guessing the next tokens of samples, from tokens alone: the model then checks several of them in one step."""
