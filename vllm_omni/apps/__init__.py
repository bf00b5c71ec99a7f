"""Programs that use the server as its clients do: over HTTP, and without the engine."""
