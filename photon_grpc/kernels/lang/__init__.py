"""The languages of kernels: Triton, Gluon, and their compilation ahead of time."""
