"""API keys, and places for calls, which a front end's gRPC and HTTP servers share."""
