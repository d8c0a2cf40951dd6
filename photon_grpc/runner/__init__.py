"""From a Batch of ints to one forward pass and sampled ids. Knows tensors, but neither requests nor text."""
