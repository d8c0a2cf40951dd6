"""lm-evaluation-harness over gRPC: importing this package registers the model `photon`."""

from lm_eval_photon.photon_lm import PhotonLM

__all__ = ["PhotonLM"]
