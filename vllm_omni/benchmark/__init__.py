"""Load on any OpenAI-compatible images server, and what came of it; a client, not the engine."""
