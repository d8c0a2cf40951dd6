"""The languages of kernels: Triton, Gluon, formulas in both, and their compilation ahead of time."""
