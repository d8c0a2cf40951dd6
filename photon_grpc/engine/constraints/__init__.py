"""Which ids a constrained output may continue with."""
