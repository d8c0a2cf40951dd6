"""`lm_eval` with the model `photon`: lm_eval 0.4.13 has no plugins, so that a module must be imported before it."""

from lm_eval.__main__ import cli_evaluate

import lm_eval_photon  # noqa: F401

if __name__ == "__main__":
    cli_evaluate()
