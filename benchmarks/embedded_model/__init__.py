"""Training of the embedded models: packages → corpus → tokenizer → target → draft → figures → model card.

    python -m benchmarks.embedded_model.corpus --wheels WHEELS --out corpus.jsonl.xz    any machine, minutes, a network
    python -m benchmarks.embedded_model --corpus corpus.jsonl.xz --out demo --compile   a GPU, minutes, no network

It needs torch, numpy, tokenizers, safetensors and transformers, and nothing else of photon_grpc. What is served is in
the directories that it writes; nothing here is imported at serving time, and no text of the corpus is kept here.
"""
