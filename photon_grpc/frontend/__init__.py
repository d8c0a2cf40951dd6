"""Speaks text: what a caller wrote becomes ids, ids become text that may be sent. Knows neither protobuf nor blocks nor
tensors."""
