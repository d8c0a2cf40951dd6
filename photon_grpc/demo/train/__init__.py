"""Training of the embedded models: corpus → tokenizer → teacher → target → draft → model card.

Run as `python -m photon_grpc.demo.train`. It needs torch, numpy, tokenizers and safetensors, and nothing else of
photon_grpc. What is served is in the directories that it writes; nothing here is imported at serving time.
"""
