"""The thin layer over vLLM: an engine for text and hidden states."""
