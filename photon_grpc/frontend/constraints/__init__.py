"""What the form of an output may be: written as a grammar, measured and tried."""
