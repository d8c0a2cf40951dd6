"""One benchmark for each kernel: time, and the share of the memory bandwidth (or of the matrix units) that it
reaches."""
