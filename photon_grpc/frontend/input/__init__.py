"""Encoding of inputs: text, chats and ids become prompt ids."""
