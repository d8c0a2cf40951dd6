"""The text side of the service: encodes prompts into ids and decodes ids into text.

It knows neither protobuf nor blocks nor tensors.
"""
