"""Trains the small Qwen-Image checkpoint that ships as the model `demo`."""
