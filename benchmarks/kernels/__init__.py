"""One benchmark for each kernel: time, and the part of the memory bandwidth or of the matrix units that it reaches."""
