"""What a weight format costs in quality: the embedded model on text that it has not learnt."""
