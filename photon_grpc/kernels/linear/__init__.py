"""Products with weights, and what stands before and behind them."""
